"""TransferQueue: writes our batches as samples, which training processes fetch once each."""
