"""A scenario out of a running vLLM: what its steps cost, measured by requests of our own."""
