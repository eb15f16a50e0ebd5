"""TransferQueue: our batches as samples that training processes fetch, each once."""
