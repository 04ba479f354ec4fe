"""vLLM: its own backend, with tree attention for decode and verification.

See docs/hosts-vllm.md.
"""
