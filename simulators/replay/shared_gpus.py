"""A trainer on the instances' GPUs: they make way for each of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.replay.sim_node import SimNode

TRAINER = "trainer"


class SharedGpus:
    """Stops all instances that are here, says when the last has stopped, and lets them go on.

    on_stopped  called when the last instance has made way
    """

    def __init__(
        self, nodes: Mapping[str, SimNode], changed: dict[SimNode, None], queue: EventQueue
    ) -> None:
        self.on_stopped: Callable[[], None] = _nobody
        self._nodes = nodes
        self._changed = changed
        self._queue = queue
        self._stopping: set[SimNode] = set()
        self._clears_cache: bool | None = None  # how instances are paused now; None: they are not

    def stop_all(self, clear_cache: bool) -> None:
        """Freeze everything; `on_stopped` is called when that is done."""
        self._clears_cache = clear_cache
        self._stopping.update(self._nodes.values())
        for node in self._nodes.values():
            self._stop(node, clear_cache)
        if not self._nodes:
            self.on_stopped()

    def resume_all(self) -> None:
        self._clears_cache = None
        for node in self._nodes.values():
            if node.resume(TRAINER, self._queue.now):
                self._changed[node] = None

    def joined(self, node: SimNode) -> None:
        """It must not run either while the trainer does, who does not wait for it."""
        if self._clears_cache is not None:
            self._stop(node, self._clears_cache)

    def stopped(self, node: SimNode) -> None:
        """It has made way, or has gone."""
        if node in self._stopping:
            self._stopping.remove(node)
            if not self._stopping:
                self.on_stopped()

    def close(self) -> None:
        """Leave no cycles."""
        self.on_stopped = _nobody

    def _stop(self, node: SimNode, clear_cache: bool) -> None:
        node.pause(TRAINER, self._queue.now, "keep", clear_cache)
        self._changed[node] = None


def _nobody() -> None:
    """No trainer shares the GPUs."""
