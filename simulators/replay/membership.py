"""Membership of the simulated fleet: instances join, are lost, leave, and return."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rollout_sched.core.actions import Release
from rollout_sched.core.events import Event, InstanceJoined, InstanceLeaving, InstanceLost
from rollout_sched.simulators.instance.reference.instance import ReferenceInstance
from rollout_sched.simulators.instance.sim_instance import SimInstance
from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.replay.scenario import Scenario
from rollout_sched.simulators.replay.sim_attempts import SimAttempts
from rollout_sched.simulators.replay.sim_fleet import SimFleet
from rollout_sched.simulators.replay.sim_node import INFINITY, SimNode


class SimMembership:
    """Adds instances to the fleet, removes them, and reports both to the scheduler."""

    def __init__(
        self,
        scenario: Scenario,
        fleet: SimFleet,
        attempts: SimAttempts,
        queue: EventQueue,
        tell: Callable[[Event], None],
        instance: type[SimInstance] | type[ReferenceInstance],
    ) -> None:
        self._scenario = scenario
        self._fleet = fleet
        self._attempts = attempts
        self._queue = queue
        self._tell = tell
        self._make = instance

    def start(self, absent: Collection[str]) -> None:
        """All instances join, except those that are absent at first."""
        here = [name for name in self._scenario.fleet.names if name not in absent]
        for name in here:  # all are in the fleet before the first gets work
            self._fleet.nodes[name] = SimNode(name, self._make(self._scenario.instance))
        for name in here:
            self._tell_joined(name)

    def join(self, name: str) -> None:
        """The instance (re)starts with its initial weights."""
        nodes = self._fleet.nodes
        if name in nodes:
            return
        nodes[name] = node = SimNode(name, self._make(self._scenario.instance))
        self._fleet.gpus.joined(node)
        self._tell_joined(name)

    def lose(self, name: str, returns_after_s: float = 0.0) -> None:
        """The instance dies with all its requests; tokens already streamed are reported first."""
        node = self._fleet.nodes.get(name)
        if node is not None:
            self._take_out(node, returns_after_s, "lost")

    def leave(self, name: str, returns_after_s: float = 0.0) -> None:
        """The instance finishes its requests and leaves."""
        node = self._fleet.nodes.get(name)
        if node is not None:
            node.leaving, node.returns_after_s = True, returns_after_s
            self._tell(InstanceLeaving(name))

    def release(self, action: Release) -> None:
        """The instance has finished its requests; it leaves after all current events."""
        self._queue.after(0.0, self._released, self._fleet.nodes[action.instance])

    def join_again(self) -> None:
        """Report all instances to a new scheduler, and those that are leaving as leaving."""
        for node in list(self._fleet.nodes.values()):
            self._tell_joined(node.name, node.instance.version)
            if node.leaving:
                self._tell(InstanceLeaving(node.name))

    def _released(self, node: SimNode) -> None:
        if self._fleet.is_here(node):
            self._take_out(node, node.returns_after_s, "drained", asked=True)

    def _take_out(
        self, node: SimNode, returns_after_s: float, reason: str, *, asked: bool = False
    ) -> None:
        fleet, name = self._fleet, node.name
        fleet.catch_up(node)
        held = self._attempts.on(name)
        for attempt in held:
            fleet.tell_streamed(node, attempt)
        self._attempts.drop(held)
        del fleet.nodes[name]
        fleet.changed.pop(node, None)
        node.due = INFINITY
        node.instance.close()
        self._tell(InstanceLost(name, reason, asked))
        fleet.gpus.gone(node)
        if returns_after_s:
            self._queue.after(returns_after_s, self.join, name)

    def _tell_joined(self, name: str, version: int = 0) -> None:
        fleet = self._scenario.fleet
        tokens = fleet.kv_tokens // fleet.block_size * fleet.block_size
        self._tell(InstanceJoined(name, fleet.max_num_seqs, tokens, version))
