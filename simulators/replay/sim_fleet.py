"""The simulated fleet: carries out orders to instances, and reports what they do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rollout_sched.core.actions import Dispatch, Interrupt, Pause, Resume, UpdateWeights
from rollout_sched.core.events import (
    Event,
    InstancePaused,
    RequestFailed,
    RequestFinished,
    TokensArrived,
    ToolReturned,
    TrajectoryEnded,
    WeightsUpdated,
)
from rollout_sched.simulators.instance.sim_request import Ended, SimRequest
from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.replay.faults import Failing, Failures
from rollout_sched.simulators.replay.scenario import Scenario
from rollout_sched.simulators.replay.shared_gpus import SharedGpus
from rollout_sched.simulators.replay.sim_attempts import SimAttempts
from rollout_sched.simulators.replay.sim_node import INFINITY, SimNode

SCHEDULER = "scheduler"
EARLIER = "an earlier scheduler"


class SimFleet:
    """The instances in the fleet, by name.

    changed    those that got an input or gave an output since they were last planned
    gpus       whether and how they are shared with a trainer
    is_acting  whether the tool after an attempt's turn is still wanted; None: always
    """

    def __init__(
        self,
        scenario: Scenario,
        attempts: SimAttempts,
        queue: EventQueue,
        tell: Callable[[Event], None],
        is_acting: Callable[[str, int], bool] | None = None,
    ) -> None:
        self.nodes: dict[str, SimNode] = {}
        self.changed: dict[SimNode, None] = {}
        self.gpus = SharedGpus(self.nodes, self.changed, queue)
        self._update_s = scenario.weights.seconds
        self._attempts = attempts
        self._queue = queue
        self._tell = tell
        self._is_acting = is_acting
        self._failures = Failures(scenario.faults) if scenario.faults else None
        self._streams = scenario.visibility.stream_s > 0
        self._tool_after_s = 0.0  # a tool starts after a round trip to the scheduler
        if scenario.links is not None:
            self._tool_after_s = scenario.links.round_trip_s
        self._verifies = attempts.verifies
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
        if self._verifies:
            verified = self._attempts.verified(ended)
            if verified is not None:
                passed, rest = verified
                if isinstance(rest, SimRequest):
                    node.instance.submit(rest, self._queue.now)  # first, so that it can be stopped
                self._tell(passed)
                if isinstance(rest, RequestFinished):
                    self._tell(rest)
                return
        answer = self._attempts.end(ended)
        if answer is None:
            return
        event, tool = answer
        if tool is not None:
            seconds, returned = tool
            self._queue.after(self._tool_after_s + seconds, self._return, returned)
        self._tell(event)

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
        node = self.nodes[action.instance]
        if node.resume(SCHEDULER, self._queue.now):
            self.changed[node] = None

    def update_weights(self, action: UpdateWeights) -> None:
        node = self.nodes[action.instance]
        self._queue.after(self._update_s, self._loaded, (node, action, self._schedulers))

    def _loaded(self, loading: tuple[SimNode, UpdateWeights, int]) -> None:
        node, action, scheduler = loading
        if self.is_here(node) and scheduler == self._schedulers:
            node.instance.set_version(action.version, self._queue.now)
            self._tell(WeightsUpdated(action.instance, action.version))

    # -- a scheduler that dies -------------------------------------------------------------

    def break_off(self) -> None:
        """Stop every attempt, and drop every order that is not carried out yet; report what was
        streamed first. Paused instances resume, and lent ones are taken back."""
        for node in list(self.nodes.values()):
            self.catch_up(node)
            held = self._attempts.on(node.name)
            for attempt in held:
                self.tell_streamed(node, attempt)
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
