"""vLLM instances behind the live driver's port, over HTTP and in process, and weight loaders."""
