"""Real vLLM servers, in the environment in which vLLM is installed."""
