"""Tests with real servers: SGLang's here, vLLM's in ``vllm``, shared parts in ``common``."""
