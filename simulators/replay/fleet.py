"""The simulated fleet: carries out orders to instances, and reports what they do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Final

from rollout_sched.core.model.actions import (
    Dispatch,
    Interrupt,
    Pause,
    Release,
    Resume,
    UpdateWeights,
)
from rollout_sched.core.model.events import (
    Event,
    InstanceJoined,
    InstanceLeaving,
    InstanceLost,
    InstancePaused,
    InstanceReported,
    RequestFailed,
    TokensArrived,
    ToolReturned,
    TrajectoryEnded,
    WeightsUpdated,
)
from rollout_sched.simulators.instance import Ended, PauseMode, SimInstance
from rollout_sched.simulators.replay.attempts import SimAttempts
from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.replay.faults import Failing, Failures, slowdown
from rollout_sched.simulators.replay.links import SimLinks, SimWeights
from rollout_sched.simulators.replay.scenario import Scenario

# ------------------------------------------------------------------------------------------
# An instance of the closed loop, and who has paused it.

INFINITY: Final = float("inf")


class SimNode:
    """A simulated instance under its name.

    due              when it is next advanced; older plans are void
    paused_by        who has paused it; it resumes when all of them have resumed it
    pausing          the owners of pauses that it has not confirmed yet, in order
    leaving          it was asked to leave
    returns_after_s  seconds from its release until it joins again; 0: never
    """

    __slots__ = ("due", "instance", "leaving", "name", "paused_by", "pausing", "returns_after_s")

    def __init__(self, name: str, instance: SimInstance) -> None:
        self.name = name
        self.instance = instance
        self.due = INFINITY
        self.paused_by: set[str] = set()
        self.pausing: deque[str] = deque()
        self.leaving = False
        self.returns_after_s = 0.0

    def pause(self, owner: str, now: float, mode: PauseMode, clear_cache: bool) -> None:
        self.paused_by.add(owner)
        self.pausing.append(owner)
        self.instance.pause(now, mode, clear_cache)

    def resume(self, owner: str, now: float) -> bool:
        """Returns whether it resumes; False if somebody else still pauses it."""
        self.paused_by.discard(owner)
        if self.paused_by:
            return False
        self.instance.resume(now)
        return True

    def report(self) -> InstanceReported:
        """The result of a poll."""
        gauges = self.instance.gauges()
        return InstanceReported(
            self.name,
            gauges.running,
            gauges.waiting,
            gauges.kv_usage,
            gauges.preemptions,
            gauges.prefill_tokens,
            gauges.cached_tokens,
            gauges.reprefilled_tokens,
            gauges.generated_tokens,
            gauges.drafted_tokens,
            gauges.accepted_tokens,
        )


# ------------------------------------------------------------------------------------------
# A trainer on the instances' GPUs: instances stop for each of its steps, lent ones earlier.

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

    def instance_gone(self, node: SimNode) -> None:
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


SCHEDULER = "scheduler"
EARLIER = "an earlier scheduler"


class SimFleet:
    """The instances in the fleet, by name.

    changed    those that got an input or gave an output since they were last planned
    gpus       whether and how they are shared with a trainer
    weights    brings them new weights
    is_acting  whether the tool after an attempt's turn is still wanted; None: always
    links      on which answers travel to the scheduler; None: it knows them at once
    """

    def __init__(
        self,
        scenario: Scenario,
        attempts: SimAttempts,
        queue: EventQueue,
        tell: Callable[[Event], None],
        is_acting: Callable[[str, int], bool] | None = None,
        links: SimLinks | None = None,
    ) -> None:
        self.nodes: dict[str, SimNode] = {}
        self.changed: dict[SimNode, None] = {}
        self.gpus = SharedGpus(self.nodes, self.changed, queue)
        self.weights = SimWeights(
            scenario.weights, scenario.network, scenario.fleet.names, self.nodes, queue
        )
        self._attempts = attempts
        self._queue = queue
        self._tell = tell if links is None else links.tell
        self._links = links
        self._is_acting = is_acting
        self._failures = Failures(scenario.faults) if scenario.faults else None
        self._streams = scenario.visibility.stream_s > 0
        self._schedulers = 1  # how many there have been

    def is_here(self, node: SimNode) -> bool:
        """Whether this node is still in the fleet; its name may belong to a new node now."""
        return self.nodes.get(node.name) is node

    def close(self) -> None:
        """Break reference cycles, so that memory is freed without the garbage collector."""
        for node in self.nodes.values():
            node.instance.close()
        self.nodes.clear()
        self.gpus.close()

    # -- time ------------------------------------------------------------------------------

    def plan_changed(self) -> None:
        """Called once after each callback of the queue, however many answers and orders it had."""
        for node in self.changed:
            node.due = at = node.instance.next_at()
            if at < INFINITY:
                self._queue.at(at, self._due, node)
        self.changed.clear()

    def catch_up(self, node: SimNode) -> None:
        """Report what is due, so that the instance's counters are current."""
        while node.instance.next_at() <= self._queue.now:
            self._advance(node)
        node.instance.advance(self._queue.now)  # nothing more is due

    def _due(self, node: SimNode) -> None:
        if node.due == self._queue.now:
            self._advance(node)

    def _advance(self, node: SimNode) -> None:
        """Report what has happened on the instance."""
        self.changed[node] = None
        for outcome in node.instance.advance(self._queue.now):
            if isinstance(outcome, Ended):
                self._answer(node, outcome)
            else:
                self._paused(node, node.pausing.popleft())

    def _paused(self, node: SimNode, by: str) -> None:
        if by == SCHEDULER:
            self._tell(InstancePaused(node.name))
        elif by != EARLIER:
            self.gpus.stopped(node)

    def _answer(self, node: SimNode, ended: Ended) -> None:
        answer = self._attempts.end(ended)
        if answer is None:
            return
        event, tool = answer
        self._tell(event)
        if tool is not None:
            seconds, returned = tool
            links = self._links
            starts_at = (
                self._queue.now if links is None else links.acknowledged_at(returned.request)
            )
            self._queue.at(starts_at + seconds, self._return, returned)

    def _return(self, returned: ToolReturned) -> None:
        """A tool has finished or failed. If its trajectory was discarded or starts over, the tool
        is ignored."""
        if self._is_acting is not None and not self._is_acting(returned.request, returned.attempt):
            return
        event: Event = returned
        if self._failures and self._failures.of_tool(returned.attempt, self._queue.now):
            event = TrajectoryEnded(returned.request, returned.attempt, "failed")
        self._tell(event)

    # -- what the scheduler orders ---------------------------------------------------------

    def dispatch(self, action: Dispatch) -> None:
        node = self.nodes[action.instance]
        node.instance.submit(self._attempts.begin(action), self._queue.now)
        self.changed[node] = None
        if self._failures is not None:
            failing = self._failures.failure_of(action, self._queue.now)
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
        node = self.nodes[action.instance]
        if node.resume(SCHEDULER, self._queue.now):
            self.changed[node] = None

    def update_weights(self, action: UpdateWeights) -> None:
        node = self.nodes[action.instance]
        loading = (node, action, self._schedulers)
        self.weights.load(node.name, action.version, self._loaded, loading)

    def _loaded(self, loading: tuple[SimNode, UpdateWeights, int]) -> None:
        node, action, scheduler = loading
        if self.is_here(node) and scheduler == self._schedulers:
            node.instance.set_version(action.version, self._queue.now)
            self._tell(WeightsUpdated(action.instance, action.version))

    # -- a scheduler that dies -------------------------------------------------------------

    def break_off(self) -> None:
        """Stop every attempt, and drop every order that is not carried out yet; report what was
        streamed first. Paused instances resume, and lent ones are taken back."""
        nodes = list(self.nodes.values())
        # Each report may bring orders to any node, so nothing is stopped before the last report.
        for node in nodes:
            self.catch_up(node)
        for node in nodes:
            for attempt in self._attempts.on(node.name):
                self.tell_streamed(node, attempt)
        for node in nodes:
            held = self._attempts.on(node.name)
            for attempt in held:
                node.instance.abort(attempt, self._queue.now)
            self._attempts.drop(held)
            node.pausing = deque([EARLIER if by == SCHEDULER else by for by in node.pausing])
            if SCHEDULER in node.paused_by:
                node.resume(SCHEDULER, self._queue.now)
            self.changed[node] = None
        self.gpus.take_all_back()
        self._schedulers += 1

    # -- attempts that break off -----------------------------------------------------------

    def _fail(self, what: tuple[SimNode, Dispatch, Failing]) -> None:
        """The attempt fails, unless it has answered by now."""
        node, action, failing = what
        if not self.is_here(node):
            return
        self.catch_up(node)
        if action.attempt not in self._attempts:
            return
        node.instance.abort(action.attempt, self._queue.now)
        self.changed[node] = None
        self.tell_streamed(node, action.attempt)
        self._attempts.drop((action.attempt,))
        self._tell(RequestFailed(action.request, action.attempt, failing.reason, failing.blame))

    def tell_streamed(self, node: SimNode, attempt: int) -> None:
        """Report what the failing attempt has streamed, so that it is not lost."""
        if self._streams:
            tokens = node.instance.progress(self._queue.now).get(attempt, 0)
            if tokens:
                self._tell(TokensArrived(self._attempts.request_of(attempt), attempt, tokens))


class SimMembership:
    """Adds instances to the fleet, removes them, and reports both to the scheduler."""

    def __init__(
        self,
        scenario: Scenario,
        fleet: SimFleet,
        attempts: SimAttempts,
        queue: EventQueue,
        tell: Callable[[Event], None],
    ) -> None:
        self._scenario = scenario
        self._fleet = fleet
        self._attempts = attempts
        self._queue = queue
        self._tell = tell

    def start(self, absent: Collection[str]) -> None:
        """All instances join, except those that are absent at first."""
        here = [name for name in self._scenario.fleet.names if name not in absent]
        for name in here:  # all are in the fleet before the first gets work
            self._add(name)
        for name in here:
            self._tell_joined(name)

    def join(self, name: str) -> None:
        """The instance (re)starts with its initial weights."""
        if name in self._fleet.nodes:
            return
        self._fleet.gpus.joined(self._add(name))
        self._tell_joined(name)

    def slow(self, name: str) -> None:
        """The instance, if it is in the fleet, runs as fast as the faults of this time allow."""
        node, now = self._fleet.nodes.get(name), self._queue.now
        if node is not None:
            node.instance.slow(slowdown(self._scenario.faults, name, now), now)
            self._fleet.changed[node] = None

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

    def _add(self, name: str) -> SimNode:
        node = self._fleet.nodes[name] = SimNode(name, SimInstance(self._scenario.instance))
        if self._scenario.faults:
            self.slow(name)
        return node

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
        fleet.gpus.instance_gone(node)
        if returns_after_s:
            self._queue.after(returns_after_s, self.join, name)

    def _tell_joined(self, name: str, version: int = 0) -> None:
        spec = self._scenario.instance
        size = spec.max_num_seqs, spec.kv_tokens
        self._tell(InstanceJoined(name, *size, version, spec.max_model_len))
