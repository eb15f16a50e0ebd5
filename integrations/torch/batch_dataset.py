"""A scheduler's batches as a data set, for a DataLoader with or without workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch.utils.data import IterableDataset, get_worker_info

from rollout_sched.live.trainer.samples import Batch

#: Seconds between two checks whether the weights that a batch waits for have been published.
POLL_S = 0.1


class Rollouts(Protocol):
    """The calls to a scheduler, as `rollout_sched.client.BlockingRollouts` has them."""

    def next_batch(self, *, parts: bool = False) -> Batch | None: ...
    def acknowledge(self, batch: int) -> None: ...
    def state(self) -> dict[str, Any]: ...


class BatchDataset(IterableDataset[Batch]):
    """Yields every batch once, in order, until submissions are closed and nothing is left.

        loader = DataLoader(
            BatchDataset(partial(connect, "http://gateway:9000")),
            batch_size=None,
            num_workers=1,
            collate_fn=partial(padded, pad_token_id=0),
        )

    open                returns the scheduler as a context manager. With workers it is called in
                        one of them, so it must be picklable and connect to a gateway. The other
                        workers stay idle: one is enough.
    parts               yield parts of a batch as their groups become complete
    batches_per_version how many batches the trainer trains with the weights of one version

    A worker runs ahead of the trainer. If it asked for a batch before the trainer has published the
    weights for it, the batch would be staler than the scheduler knows. So a worker waits with the
    next request until the trainer has published these weights.
    """

    def __init__(
        self,
        open: Callable[[], AbstractContextManager[Rollouts]],
        *,
        parts: bool = False,
        batches_per_version: int = 1,
    ) -> None:
        self._open = open
        self._parts = parts
        self._batches_per_version = batches_per_version
        self._received: int | None = None

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        if worker is not None and worker.id:
            return
        with self._open() as rollouts:
            if self._received is not None:
                rollouts.acknowledge(self._received)
            taken = _Taken(self._batches_per_version)
            while (batch := rollouts.next_batch(parts=self._parts)) is not None:
                if batch.last:
                    self._received = batch.number
                    taken.count(batch.version)
                yield batch
                if worker is not None:
                    taken.wait(rollouts)

    def state_dict(self) -> dict[str, Any]:
        """The number of the last whole batch that was yielded. With a worker, only the worker's
        copy knows it; torchdata's StatefulDataLoader asks that copy."""
        return {"received": self._received}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after that batch, if the scheduler has kept the following ones, as a gateway
        that keeps running does. Without this call, the last batch that was not acknowledged is
        yielded again."""
        self._received = state["received"]


class _Taken:
    """Counts the batches taken with the trainer's current version."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._version = -1
        self._batches = 0

    def count(self, version: int) -> None:
        if version != self._version:
            self._version, self._batches = version, 0
        self._batches += 1

    def wait(self, rollouts: Rollouts) -> None:
        """Wait until the next batch may be requested, or there is none."""
        while self._batches >= self._most:
            state = rollouts.state()
            if state["version"] != self._version or _over(state):
                return
            time.sleep(POLL_S)


def _over(state: dict[str, Any]) -> bool:
    """Whether no groups are left and no more will come."""
    groups = state["groups"]
    here = sum(groups.values()) - groups["delivered"]
    return bool(state["closed"]) and not here and not state["in_batch"]
