"""The durable store on disk: facts by kind and name, and tokens by owner.

It knows nothing of scheduling. `store.Store` is the whole interface: changes are applied in
transactions, and the current content is read at the next opening. `writer.StoreWriter` applies them
in a thread, so that an event loop waits only for what it has promised.
"""

from rollout_sched.store import transaction
from rollout_sched.store.errors import PieceDamaged, StoreBroken, StoreError, StoreFull, StoreInUse
from rollout_sched.store.store import Durable, Store
from rollout_sched.store.writer import StoreWriter

__all__ = [
    "Durable",
    "PieceDamaged",
    "Store",
    "StoreBroken",
    "StoreError",
    "StoreFull",
    "StoreInUse",
    "StoreWriter",
    "transaction",
]
