"""A trainer on the instances' GPUs: they make way for each of its steps, some of them sooner."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.replay.sim_node import SimNode

TRAINER = "trainer"


class SharedGpus:
    """Stops all instances that are here, says when the last has stopped, and lets them go on; or
    some of them sooner, if they are lent.

    on_stopped  called when the last instance has made way
    on_lent     called when the share of the instances that is lent has changed
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
        self._making_way: set[SimNode] = set()  # they are lent, and have not stopped yet
        self._lent: dict[SimNode, None] = {}
        self._clears_cache: bool | None = None  # how instances are paused now; None: they are not

    @property
    def lent_share(self) -> float:
        """Of the instances that are here, the share that has made way because it was lent."""
        return len(self._lent) / len(self._nodes) if self._lent else 0.0

    def stop_all(self, clear_cache: bool) -> None:
        """Freeze everything; `on_stopped` is called when that is done."""
        self._clears_cache = clear_cache
        running = [node for node in self._nodes.values() if node not in self._lent]
        self._stopping.update(running)
        for node in running:
            if node not in self._making_way:
                self._stop(node, clear_cache)
        if not self._stopping:
            self.on_stopped()

    def resume_all(self) -> list[str]:
        """Whatever has stopped goes on; returns who was lent."""
        self._clears_cache = None
        lent = [node.name for node in self._lent]
        self._lent.clear()
        for node in self._nodes.values():
            self._resume(node)
        return lent

    def lend(self, name: str) -> None:
        """An instance without work makes way by itself."""
        node = self._nodes[name]
        self._making_way.add(node)
        self._stop(node, clear_cache=True)

    def take_back(self, name: str) -> None:
        """One that was lent goes on."""
        node = self._nodes[name]
        self._forget(node)
        if self._clears_cache is None:
            self._resume(node)

    def take_all_back(self) -> None:
        for node in [*self._making_way, *self._lent]:
            self.take_back(node.name)

    def joined(self, node: SimNode) -> None:
        """It must not run either while the trainer does, who does not wait for it."""
        if self._clears_cache is not None:
            self._stop(node, self._clears_cache)

    def stopped(self, node: SimNode) -> None:
        """It has made way."""
        if node in self._making_way:
            self._making_way.remove(node)
            self._lent[node] = None
            self.on_lent()
        self._has_stopped(node)

    def gone(self, node: SimNode) -> None:
        """Nobody need wait for it any more."""
        self._forget(node)
        self._has_stopped(node)

    def close(self) -> None:
        """Leave no cycles."""
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
