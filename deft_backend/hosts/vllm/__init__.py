"""vLLM: its own backend, with tree attention for decode batches. See docs/hosts-vllm.md."""
