"""The simulated fleet: carries out what is ordered of instances, and tells what they do."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rollout_sched.core.actions import Dispatch, Interrupt, Pause, Release, Resume, UpdateWeights
from rollout_sched.core.events import (
    Event,
    InstanceJoined,
    InstanceLeaving,
    InstanceLost,
    InstancePaused,
    RequestFailed,
    TokensArrived,
    WeightsUpdated,
)
from rollout_sched.simulators.instance.reference.instance import ReferenceInstance
from rollout_sched.simulators.instance.sim_instance import SimInstance
from rollout_sched.simulators.instance.sim_request import Ended
from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.replay.faults import Failing, Failures
from rollout_sched.simulators.replay.scenario import Scenario
from rollout_sched.simulators.replay.sim_attempts import SimAttempts
from rollout_sched.simulators.replay.sim_node import INFINITY, SimNode

SCHEDULER, TRAINER = "scheduler", "trainer"


class SimFleet:
    """The instances that are here, by name.

    changed   those that were told something, or have said something, since they were planned last
    stopping  those that are still to make way for the trainer; `on_stopped` is called when the
              last of them has
    failures  which attempts are to fail
    streams   whether answers are streamed: what was streamed of an attempt that breaks off is told
              then, and so not lost
    """

    def __init__(
        self,
        scenario: Scenario,
        attempts: SimAttempts,
        queue: EventQueue,
        tell: Callable[[Event], None],
        instance: type[SimInstance] | type[ReferenceInstance],
    ) -> None:
        self.nodes: dict[str, SimNode] = {}
        self.changed: dict[SimNode, None] = {}
        self.stopping: set[SimNode] = set()
        self.on_stopped: Callable[[], None] = _nobody
        self._scenario = scenario
        self._attempts = attempts
        self._queue = queue
        self._tell = tell
        self._make = instance
        self._failures = Failures(scenario.faults) if scenario.faults else None
        self._streams = scenario.visibility.stream_s > 0
        self._clears_cache: bool | None = None  # how the trainer pauses it; None: it does not

    def start(self, absent: Collection[str] = ()) -> None:
        """All join but those that are absent yet."""
        here = [name for name in self._scenario.fleet.names if name not in absent]
        for name in here:  # all are there before the first of them is given work
            self.nodes[name] = SimNode(name, self._make(self._scenario.instance))
        for name in here:
            self._tell_joined(name)

    def close(self) -> None:
        """Leave no cycles: what was simulated is let go at once, without the garbage collector."""
        for node in self.nodes.values():
            node.instance.close()
        self.nodes.clear()
        self.on_stopped = _nobody

    # -- time ------------------------------------------------------------------------------

    def plan_changed(self) -> None:
        """Once after each callback of the queue, however many answers and orders it brought."""
        for node in self.changed:
            node.due = at = node.instance.next_at()
            if at < INFINITY:
                self._queue.at(at, self._due, node)
        self.changed.clear()

    def catch_up(self, node: SimNode) -> None:
        """Tell what is due: then its counters are those of this very moment."""
        while node.instance.next_at() <= self._queue.now:
            self._advance(node)
        node.instance.advance(self._queue.now)  # nothing is due any more

    def _due(self, node: SimNode) -> None:
        if node.due == self._queue.now:
            self._advance(node)

    def _advance(self, node: SimNode) -> None:
        """Tell what has happened on the instance."""
        self.changed[node] = None
        for outcome in node.instance.advance(self._queue.now):
            if isinstance(outcome, Ended):
                self._answer(outcome)
            elif node.pausing.popleft() == SCHEDULER:
                self._tell(InstancePaused(node.name))
            else:
                self._stopped(node)

    def _answer(self, ended: Ended) -> None:
        answer = self._attempts.end(ended)
        if answer is None:
            return
        event, tool = answer
        if tool is not None:
            seconds, returned = tool
            self._queue.after(seconds, self._tell, returned)
        self._tell(event)

    # -- what the scheduler orders ---------------------------------------------------------

    def dispatch(self, action: Dispatch) -> None:
        node = self.nodes[action.instance]
        node.instance.submit(self._attempts.begin(action), self._queue.now)
        self.changed[node] = None
        if self._failures is not None:
            failing = self._failures.of(action, self._queue.now)
            if failing is not None:
                self._queue.after(failing.after_s, self._fail, (node, action, failing))

    def interrupt(self, action: Interrupt) -> None:
        node = self.nodes[action.instance]
        node.instance.abort(action.attempt, self._queue.now)
        self.changed[node] = None

    def pause(self, action: Pause) -> None:
        node = self.nodes[action.instance]
        node.pause(SCHEDULER, self._queue.now, action.mode, action.clear_cache)
        self.changed[node] = None

    def resume(self, action: Resume) -> None:
        self._resume_for(SCHEDULER, self.nodes[action.instance])

    def update_weights(self, action: UpdateWeights) -> None:
        node = self.nodes[action.instance]
        self._queue.after(self._scenario.weights.seconds, self._loaded, (node, action))

    def release(self, action: Release) -> None:
        self._queue.after(0.0, self._released, self.nodes[action.instance])

    def _loaded(self, loading: tuple[SimNode, UpdateWeights]) -> None:
        node, action = loading
        if self._is_here(node):
            node.instance.set_version(action.version, self._queue.now)
            self._tell(WeightsUpdated(action.instance, action.version))

    def _resume_for(self, owner: str, node: SimNode) -> None:
        if node.resume(owner, self._queue.now):
            self.changed[node] = None

    # -- making way for a trainer on the same GPUs -----------------------------------------

    def stop_all(self, clear_cache: bool) -> None:
        """Freeze everything; `on_stopped` is called when that is done."""
        self._clears_cache = clear_cache
        self.stopping.update(self.nodes.values())
        for node in self.nodes.values():
            self._stop(node, clear_cache)
        if not self.nodes:
            self.on_stopped()

    def resume_all(self) -> None:
        self._clears_cache = None
        for node in self.nodes.values():
            self._resume_for(TRAINER, node)

    def _stop(self, node: SimNode, clear_cache: bool) -> None:
        node.pause(TRAINER, self._queue.now, "keep", clear_cache)
        self.changed[node] = None

    def _stopped(self, node: SimNode) -> None:
        """It has made way for the trainer, which waits for the last to do so."""
        if node in self.stopping:
            self.stopping.remove(node)
            if not self.stopping:
                self.on_stopped()

    # -- coming and going ------------------------------------------------------------------

    def join(self, name: str) -> None:
        """It (re)starts, with the weights that it always starts with."""
        if name in self.nodes:
            return
        self.nodes[name] = node = SimNode(name, self._make(self._scenario.instance))
        if self._clears_cache is not None:
            self._stop(node, self._clears_cache)
        self._tell_joined(name)

    def lose(self, name: str, returns_after_s: float = 0.0, reason: str = "lost") -> None:
        """It is gone, and what it held with it; what was streamed of that is told first."""
        node = self.nodes.get(name)
        if node is None:
            return
        self.catch_up(node)
        held = self._attempts.on(name)
        for attempt in held:
            self._tell_streamed(node, attempt)
        self._attempts.drop(held)
        del self.nodes[name]
        self.changed.pop(node, None)
        node.due = INFINITY
        node.instance.close()
        self._tell(InstanceLost(name, reason))
        self._stopped(node)
        if returns_after_s:
            self._queue.after(returns_after_s, self.join, name)

    def leave(self, name: str, returns_after_s: float = 0.0) -> None:
        """It finishes what it has, and goes."""
        node = self.nodes.get(name)
        if node is not None:
            node.returns_after_s = returns_after_s
            self._tell(InstanceLeaving(name))

    def _tell_joined(self, name: str) -> None:
        fleet = self._scenario.fleet
        tokens = fleet.kv_tokens // fleet.block_size * fleet.block_size
        self._tell(InstanceJoined(name, fleet.max_num_seqs, tokens))

    def _released(self, node: SimNode) -> None:
        if self._is_here(node):
            self.lose(node.name, node.returns_after_s, "left")

    def _is_here(self, node: SimNode) -> bool:
        return self.nodes.get(node.name) is node

    # -- attempts that break off -----------------------------------------------------------

    def _fail(self, what: tuple[SimNode, Dispatch, Failing]) -> None:
        """The attempt gives no answer, unless it has given one by now."""
        node, action, failing = what
        if not self._is_here(node):
            return
        self.catch_up(node)
        if action.attempt not in self._attempts:
            return
        node.instance.abort(action.attempt, self._queue.now)
        self.changed[node] = None
        self._tell_streamed(node, action.attempt)
        self._attempts.drop((action.attempt,))
        self._tell(RequestFailed(action.request, action.attempt, failing.reason, failing.blame))

    def _tell_streamed(self, node: SimNode, attempt: int) -> None:
        if self._streams:
            tokens = node.instance.progress(self._queue.now).get(attempt, 0)
            if tokens:
                self._tell(TokensArrived(self._attempts.request_of(attempt), attempt, tokens))


def _nobody() -> None:
    """No trainer shares the GPUs."""
