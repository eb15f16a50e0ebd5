"""What is not to be lost, on disk: facts by kind and name, and tokens by owner.

It knows nothing of scheduling. `store.Store` is the whole interface: changes are applied in
transactions, and what is alive is read at the next opening. `writer.StoreWriter` does that in a
thread, so that an event loop waits only for what it has promised somebody.
"""
