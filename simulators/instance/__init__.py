"""A vLLM instance in virtual time: step scheduler, KV blocks, cost model, event jump."""
