"""A simulated vLLM 0.32 server: the simulated instance behind vLLM's HTTP endpoints."""
