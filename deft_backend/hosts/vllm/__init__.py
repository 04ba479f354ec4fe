"""vLLM: its own attention backend, with decode batches taken out of it. See docs/hosts-vllm.md."""
