"""A trainer on the instances' GPUs: instances stop for each of its steps, lent ones earlier."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.replay.sim_node import SimNode

TRAINER = "trainer"


class SharedGpus:
    """Stops all instances of the fleet, reports when the last has stopped, and resumes them. Lent
    instances stop earlier.

    on_stopped  called when the last instance has stopped
    on_lent     called when the share of lent instances has changed
    """

    def __init__(
        self, nodes: Mapping[str, SimNode], changed: dict[SimNode, None], queue: EventQueue
    ) -> None:
        self.on_stopped: Callable[[], None] = _nobody
        self.on_lent: Callable[[], None] = _nobody
        self._nodes = nodes
        self._changed = changed
        self._queue = queue
        self._stopping: set[SimNode] = set()
        self._making_way: set[SimNode] = set()  # lent, but not stopped yet
        self._lent: dict[SimNode, None] = {}
        self._clears_cache: bool | None = None  # how instances are paused; None: not paused

    @property
    def lent_share(self) -> float:
        """The share of the fleet's instances that have stopped because they are lent."""
        return len(self._lent) / len(self._nodes) if self._lent else 0.0

    def stop_all(self, clear_cache: bool) -> None:
        """Stop all instances; `on_stopped` is called when that is done."""
        self._clears_cache = clear_cache
        running = [node for node in self._nodes.values() if node not in self._lent]
        self._stopping.update(running)
        for node in running:
            if node not in self._making_way:
                self._stop(node, clear_cache)
        if not self._stopping:
            self.on_stopped()

    def resume_all(self) -> list[str]:
        """Resume all stopped instances; returns those that were lent."""
        self._clears_cache = None
        lent = [node.name for node in self._lent]
        self._lent.clear()
        for node in self._nodes.values():
            self._resume(node)
        return lent

    def lend(self, name: str) -> None:
        """Stop one instance that has no work."""
        node = self._nodes[name]
        self._making_way.add(node)
        self._stop(node, clear_cache=True)

    def take_back(self, name: str) -> None:
        """A lent instance resumes."""
        node = self._nodes[name]
        self._forget(node)
        if self._clears_cache is None:
            self._resume(node)

    def take_all_back(self) -> None:
        for node in [*self._making_way, *self._lent]:
            self.take_back(node.name)

    def joined(self, node: SimNode) -> None:
        """The instance must not run either during training; the trainer does not wait for it."""
        if self._clears_cache is not None:
            self._stop(node, self._clears_cache)

    def stopped(self, node: SimNode) -> None:
        """The instance has stopped."""
        if node in self._making_way:
            self._making_way.remove(node)
            self._lent[node] = None
            self.on_lent()
        self._has_stopped(node)

    def gone(self, node: SimNode) -> None:
        """The instance is gone: do not wait for it any more."""
        self._forget(node)
        self._has_stopped(node)

    def close(self) -> None:
        """Break reference cycles."""
        self.on_stopped = self.on_lent = _nobody

    def _forget(self, node: SimNode) -> None:
        self._making_way.discard(node)
        if node in self._lent:
            del self._lent[node]
            self.on_lent()

    def _has_stopped(self, node: SimNode) -> None:
        if node in self._stopping:
            self._stopping.remove(node)
            if not self._stopping:
                self.on_stopped()

    def _stop(self, node: SimNode, clear_cache: bool) -> None:
        node.pause(TRAINER, self._queue.now, "keep", clear_cache)
        self._changed[node] = None

    def _resume(self, node: SimNode) -> None:
        if node.resume(TRAINER, self._queue.now):
            self._changed[node] = None


def _nobody() -> None:
    """No trainer shares the GPUs."""
