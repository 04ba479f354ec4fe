"""Real servers of both hosts: ``common`` serves both; SGLang's tests stand here, vLLM's beside."""
