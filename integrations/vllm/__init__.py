"""vLLM instances for the live driver, over HTTP and in process, and weight loaders."""
