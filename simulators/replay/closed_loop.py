"""The closed loop: one scheduler, simulated instances, a trainer that waits for its batches.

This is a driver like the live one: it carries out actions and reports facts. The scheduler sees
through it only what a fleet could tell: answers, polls, streams, confirmations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rollout_sched.core.actions import (
    Action,
    Deliver,
    Discard,
    Dispatch,
    Interrupt,
    Pause,
    Resume,
    UpdateWeights,
    Wake,
)
from rollout_sched.core.errors import PolicyError
from rollout_sched.core.events import (
    BatchRequested,
    Event,
    GroupSubmitted,
    InstanceJoined,
    InstancePaused,
    InstanceReported,
    RequestFinished,
    RequestInterrupted,
    SubmissionsClosed,
    TokensArrived,
    ToolReturned,
    TurnFinished,
    WeightsPublished,
    WeightsUpdated,
    Woke,
)
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.simulators.instance.reference.instance import ReferenceInstance
from rollout_sched.simulators.instance.sim_instance import SimInstance
from rollout_sched.simulators.instance.sim_request import Ended, SimRequest
from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.replay.scenario import Scenario
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.model import Sample

INFINITY = float("inf")

Observer = Callable[[float, Event, list[Action]], None]


class SimNode:
    """A simulated instance, when it is heard next, and who wants it to stand still.

    `pausing` lists whose pauses it has not confirmed yet, in order.
    """

    __slots__ = ("due", "instance", "name", "paused_by", "pausing")

    def __init__(self, name: str, instance: SimInstance | ReferenceInstance) -> None:
        self.name = name
        self.instance = instance
        self.due = INFINITY
        self.paused_by: set[str] = set()
        self.pausing: deque[str] = deque()


class ClosedLoop:
    """One run of one policy over one workload; `run` returns the seconds it took.

    Every observer sees every (now, event, actions), which is all there is to know about a run.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        workload: Workload,
        scenario: Scenario,
        observers: Sequence[Observer] = (),
        *,
        instance: type[SimInstance] | type[ReferenceInstance] = SimInstance,
    ) -> None:
        workload.check_fits(scenario)
        self.queue = EventQueue()
        self.scheduler = scheduler
        self.workload = workload
        self.scenario = scenario
        self.observers = tuple(observers)
        self.trained = 0
        self._nodes = {
            name: SimNode(name, instance(scenario.instance))
            for name in (f"instance-{i}" for i in range(scenario.fleet.instances))
        }
        # Of every attempt: what was ordered, what it will do, and the name of its text, which is
        # the number of the attempt that began it; for those between two attempts in `_streams`.
        self._running: dict[int, tuple[Dispatch, Sample, int]] = {}
        self._streams: dict[str, int] = {}
        self._changed: dict[SimNode, None] = {}
        self._ticks = 0
        self._batch: Deliver | None = None
        self._to_stop = 0

    def run(self) -> float:
        """Until every prompt has been trained; the seconds that took.

        Raises PolicyError if the policy brings everything to a standstill.
        """
        self._begin()
        queue, prompts = self.queue, len(self.workload.prompts)
        while self.trained < prompts:
            if len(queue) <= self._ticks:
                raise PolicyError(
                    f"nothing can happen any more at {queue.now:.3f} s, with "
                    f"{self.trained} of {prompts} prompts trained"
                )
            queue.step()
            if self._changed:
                self._plan_changed()
        self._report(None)
        self._take_apart()
        return queue.now

    def _take_apart(self) -> None:
        """Leave no cycles: what was simulated is let go at once, without the garbage collector."""
        self.queue.clear()
        for node in self._nodes.values():
            node.instance.close()

    # -- telling the scheduler -------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        now = self.queue.now
        actions = self.scheduler.handle(event, now)
        for observer in self.observers:
            observer(now, event, actions)
        for action in actions:
            self._DO[type(action)](self, action)

    def _plan_changed(self) -> None:
        """Once after each callback, however many answers and orders it brought."""
        for node in self._changed:
            self._plan(node)
        self._changed.clear()

    def _begin(self) -> None:
        fleet = self.scenario.fleet
        tokens = fleet.kv_tokens // fleet.block_size * fleet.block_size
        for name in self._nodes:
            self._tell(InstanceJoined(name, fleet.max_num_seqs, tokens))
        last = 0.0
        for prompt in self.workload.prompts:
            arrival = self.workload.arrival_s(prompt)
            last = max(last, arrival)
            if arrival > 0:
                self.queue.at(arrival, self._submit, prompt)
            else:
                self._submit(prompt)
        self.queue.at(last, lambda _: self._tell(SubmissionsClosed()))
        self.queue.at(0.0, lambda _: self._tell(BatchRequested()))
        visibility = self.scenario.visibility
        if visibility.poll_s:
            self._tick(visibility.poll_s, self._report)
        if visibility.stream_s:
            self._tick(visibility.stream_s, self._stream)

    def _submit(self, prompt: str) -> None:
        load = self.workload
        self._tell(
            GroupSubmitted(
                prompt, load.samples_per_prompt, load.prompt_tokens(prompt), load.max_tokens
            )
        )

    def _tick(self, seconds: float, callback: Callable[[Any], None]) -> None:
        """Do it every so many seconds, without keeping a run alive that is stuck."""

        def again(_: Any) -> None:
            self._ticks -= 1
            callback(None)
            self._tick(seconds, callback)

        self._ticks += 1
        self.queue.after(seconds, again)

    def _report(self, _: Any) -> None:
        for node in self._nodes.values():
            self._catch_up(node)
            if not node.paused_by:  # a paused vLLM's gauges freeze
                self._tell(self._gauges(node))

    def _gauges(self, node: SimNode) -> InstanceReported:
        gauges = node.instance.gauges()
        return InstanceReported(
            node.name,
            gauges.running,
            gauges.waiting,
            gauges.kv_usage,
            gauges.preemptions,
            gauges.prefill_tokens,
            gauges.cached_tokens,
            gauges.reprefilled_tokens,
            gauges.generated_tokens,
        )

    def _stream(self, _: Any) -> None:
        for node in self._nodes.values():
            self._catch_up(node)
            for attempt, tokens in node.instance.progress(self.queue.now).items():
                self._tell(TokensArrived(self._running[attempt][0].request, attempt, tokens))

    # -- instances -------------------------------------------------------------------------

    def _catch_up(self, node: SimNode) -> None:
        """Let it say what is due: then its counters are those of this very moment."""
        while node.instance.next_at() <= self.queue.now:
            self._listen(node)
        node.instance.advance(self.queue.now)  # says nothing

    def _plan(self, node: SimNode) -> None:
        """Put the next thing the instance has to say in the event queue; older plans are void."""
        node.due = at = node.instance.next_at()
        if at < INFINITY:
            self.queue.at(at, self._ring, node)

    def _ring(self, node: SimNode) -> None:
        if node.due == self.queue.now:
            self._listen(node)

    def _listen(self, node: SimNode) -> None:
        self._changed[node] = None
        for word in node.instance.advance(self.queue.now):
            if isinstance(word, Ended):
                self._answer(word)
            elif node.pausing.popleft() == "scheduler":
                self._tell(InstancePaused(node.name))
            else:
                self._stopped()

    def _answer(self, ended: Ended) -> None:
        dispatch, sample, stream = self._running.pop(ended.attempt)
        request, tokens, spans = dispatch.request, ended.tokens, ended.spans
        if ended.reason != "stop" or len(sample.turns) > 1:
            self._streams[request] = stream  # it may go on
        if ended.reason == "abort":
            self._tell(RequestInterrupted(request, ended.attempt, tokens, spans))
            return
        made = dispatch.response_tokens + tokens
        last = dispatch.turn == len(sample.turns) - 1 or made >= self.workload.max_tokens
        if ended.reason == "stop" and not last:
            turn = sample.turns[dispatch.turn]
            returned = ToolReturned(request, ended.attempt, turn.observation_tokens)
            self.queue.after(turn.tool_s, self._tell, returned)
            self._tell(TurnFinished(request, ended.attempt, tokens, spans))
            return
        cut = ended.reason == "length" or sample.finish == "length"
        self._tell(
            RequestFinished(request, ended.attempt, tokens, spans, "length" if cut else "stop")
        )

    def _pause_for(self, owner: str, node: SimNode, mode: Any, clear_cache: bool) -> None:
        node.paused_by.add(owner)
        node.pausing.append(owner)
        node.instance.pause(self.queue.now, mode, clear_cache)
        self._changed[node] = None

    def _resume_for(self, owner: str, node: SimNode) -> None:
        node.paused_by.discard(owner)
        if not node.paused_by:
            node.instance.resume(self.queue.now)
            self._changed[node] = None

    # -- carrying out actions --------------------------------------------------------------

    def _dispatch(self, action: Dispatch) -> None:
        group, _, index = action.request.rpartition("/")
        sample = self.workload.sample(group, int(index))
        stream = self._streams.pop(action.request, action.attempt)
        if not action.computed_tokens:
            stream = action.attempt  # a new text from here on
        turns, made = sample.turns, action.response_tokens
        if action.turn:
            made -= sum(turn.output_tokens for turn in turns[: action.turn])
        request = SimRequest(
            action.attempt,
            action.context_tokens,
            turns[action.turn].output_tokens - made,
            action.max_new_tokens,
            prompt_stream=group,
            shared_tokens=self.workload.prompt_tokens(group),
            stream=stream,
            known_tokens=action.computed_tokens,
            salt=action.salt,
        )
        self._running[action.attempt] = (action, sample, stream)
        node = self._nodes[action.instance]
        node.instance.submit(request, self.queue.now)
        self._changed[node] = None

    def _interrupt(self, action: Interrupt) -> None:
        node = self._nodes[action.instance]
        node.instance.abort(action.attempt, self.queue.now)
        self._changed[node] = None

    def _pause(self, action: Pause) -> None:
        node = self._nodes[action.instance]
        self._pause_for("scheduler", node, action.mode, action.clear_cache)

    def _resume(self, action: Resume) -> None:
        self._resume_for("scheduler", self._nodes[action.instance])

    def _update_weights(self, action: UpdateWeights) -> None:
        self.queue.after(self.scenario.weights.seconds, self._loaded, action)

    def _loaded(self, action: UpdateWeights) -> None:
        self._nodes[action.instance].instance.set_version(action.version, self.queue.now)
        self._tell(WeightsUpdated(action.instance, action.version))

    def _deliver(self, action: Deliver) -> None:
        if self._streams:
            for sample in action.samples:
                self._streams.pop(sample.request, None)
        trainer = self.scenario.trainer
        if not trainer.colocated:
            self._begin_training(action)
            return
        self._batch, self._to_stop = action, len(self._nodes)
        for node in self._nodes.values():
            self._pause_for("trainer", node, "keep", not trainer.keeps_kv)

    def _stopped(self) -> None:
        """An instance made way for the colocated trainer, which waits for the last to do so."""
        self._to_stop -= 1
        if not self._to_stop and self._batch is not None:
            self._begin_training(self._batch)

    def _begin_training(self, action: Deliver) -> None:
        tokens = sum(s.prompt_tokens + s.response_tokens for s in action.samples)
        self.queue.after(self.scenario.trainer.step_s(tokens), self._train, action)

    def _train(self, action: Deliver) -> None:
        """The training step is over."""
        self.trained += len({sample.group for sample in action.samples})
        if self.trained >= len(self.workload.prompts):
            return
        if self.scenario.trainer.colocated:
            for node in self._nodes.values():
                self._resume_for("trainer", node)
        self._tell(WeightsPublished(action.version + 1))
        self._tell(BatchRequested())

    def _discard(self, action: Discard) -> None:
        """A simulated instance keeps no tokens for us, only the name of the text."""
        if action.ends:
            self._streams.pop(action.request, None)

    def _wake(self, action: Wake) -> None:
        self.queue.at(action.at, lambda _: self._tell(Woke()))

    _DO: ClassVar[dict[type[Any], Callable[[Any, Any], None]]] = {
        Dispatch: _dispatch,
        Interrupt: _interrupt,
        Pause: _pause,
        Resume: _resume,
        UpdateWeights: _update_weights,
        Deliver: _deliver,
        Discard: _discard,
        Wake: _wake,
    }
