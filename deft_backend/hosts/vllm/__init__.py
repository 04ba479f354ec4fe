"""vLLM: its own backend, with tree attention for decode and verification: docs/hosts-vllm.md."""
