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
from rollout_sched.simulators.instance.sim_instance import Ended, Instance, Work
from rollout_sched.simulators.replay.event_queue import Clockwork
from rollout_sched.simulators.replay.scenario import Scenario
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.model import Sample

INFINITY = float("inf")

Observer = Callable[[float, Event, list[Action]], None]


class Station:
    """A simulated instance, when it is heard next, and who wants it to stand still.

    `pausing` lists whose pauses it has not confirmed yet, in order.
    """

    __slots__ = ("due", "engine", "holders", "name", "pausing")

    def __init__(self, name: str, engine: Instance) -> None:
        self.name = name
        self.engine = engine
        self.due = INFINITY
        self.holders: set[str] = set()
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
        single_step: bool = False,
    ) -> None:
        workload.check_fits(scenario)
        self.clock = Clockwork()
        self.scheduler = scheduler
        self.workload = workload
        self.scenario = scenario
        self.observers = tuple(observers)
        self.trained = 0
        self._stations = {
            name: Station(name, Instance(scenario.instance, single_step=single_step))
            for name in (f"instance-{i}" for i in range(scenario.fleet.instances))
        }
        # Of every attempt: what was ordered, what it will do, and the name of its text, which is
        # the number of the attempt that began it; for those between two attempts in `_streams`.
        self._running: dict[int, tuple[Dispatch, Sample, int]] = {}
        self._streams: dict[str, int] = {}
        self._changed: dict[Station, None] = {}
        self._ticks = 0
        self._batch: Deliver | None = None
        self._to_stop = 0

    def run(self) -> float:
        """Until every prompt has been trained; the seconds that took.

        Raises PolicyError if the policy brings everything to a standstill.
        """
        self._begin()
        clock, prompts = self.clock, len(self.workload.prompts)
        while self.trained < prompts:
            if len(clock) <= self._ticks:
                raise PolicyError(
                    f"nothing can happen any more at {clock.now:.3f} s, with "
                    f"{self.trained} of {prompts} prompts trained"
                )
            clock.step()
            if self._changed:
                self._plan_changed()
        self._report(None)
        self._take_apart()
        return clock.now

    def _take_apart(self) -> None:
        """Leave no cycles: what was simulated is let go at once, without the garbage collector."""
        self.clock.clear()
        for station in self._stations.values():
            station.engine.close()

    # -- telling the scheduler -------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        now = self.clock.now
        actions = self.scheduler.handle(event, now)
        for observer in self.observers:
            observer(now, event, actions)
        for action in actions:
            self._DO[type(action)](self, action)

    def _plan_changed(self) -> None:
        """Once after each deed, however many answers and orders it brought."""
        for station in self._changed:
            self._plan(station)
        self._changed.clear()

    def _begin(self) -> None:
        fleet = self.scenario.fleet
        tokens = fleet.kv_tokens // fleet.block_size * fleet.block_size
        for name in self._stations:
            self._tell(InstanceJoined(name, fleet.max_num_seqs, tokens))
        last = 0.0
        for prompt in self.workload.prompts:
            arrival = self.workload.arrival_s(prompt)
            last = max(last, arrival)
            if arrival > 0:
                self.clock.at(arrival, self._submit, prompt)
            else:
                self._submit(prompt)
        self.clock.at(last, lambda _: self._tell(SubmissionsClosed()))
        self.clock.at(0.0, lambda _: self._tell(BatchRequested()))
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

    def _tick(self, seconds: float, deed: Callable[[Any], None]) -> None:
        """Do it every so many seconds, without keeping a run alive that is stuck."""

        def again(_: Any) -> None:
            self._ticks -= 1
            deed(None)
            self._tick(seconds, deed)

        self._ticks += 1
        self.clock.after(seconds, again)

    def _report(self, _: Any) -> None:
        for station in self._stations.values():
            self._catch_up(station)
            if not station.holders:  # a paused vLLM's gauges freeze
                self._tell(self._gauges(station))

    def _gauges(self, station: Station) -> InstanceReported:
        engine = station.engine
        return InstanceReported(
            station.name,
            engine.running,
            engine.waiting,
            engine.kv_usage,
            engine.preemptions,
            engine.prefill_tokens,
            engine.cached_tokens,
            engine.reprefilled_tokens,
            engine.generated_tokens,
        )

    def _stream(self, _: Any) -> None:
        for station in self._stations.values():
            self._catch_up(station)
            for attempt, tokens in station.engine.progress(self.clock.now).items():
                self._tell(TokensArrived(self._running[attempt][0].request, attempt, tokens))

    # -- instances -------------------------------------------------------------------------

    def _catch_up(self, station: Station) -> None:
        """Let it say what is due: then its counters are those of this very moment."""
        while station.engine.next_at() <= self.clock.now:
            self._listen(station)
        station.engine.advance(self.clock.now)  # says nothing

    def _plan(self, station: Station) -> None:
        """Put the next thing the instance has to say on the clock; older plans are void."""
        station.due = at = station.engine.next_at()
        if at < INFINITY:
            self.clock.at(at, self._ring, station)

    def _ring(self, station: Station) -> None:
        if station.due == self.clock.now:
            self._listen(station)

    def _listen(self, station: Station) -> None:
        self._changed[station] = None
        for word in station.engine.advance(self.clock.now):
            if isinstance(word, Ended):
                self._answer(word)
            elif station.pausing.popleft() == "scheduler":
                self._tell(InstancePaused(station.name))
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
            self.clock.after(turn.tool_s, self._tell, returned)
            self._tell(TurnFinished(request, ended.attempt, tokens, spans))
            return
        cut = ended.reason == "length" or sample.finish == "length"
        self._tell(
            RequestFinished(request, ended.attempt, tokens, spans, "length" if cut else "stop")
        )

    def _hold(self, station: Station, holder: str, mode: Any, clear_cache: bool) -> None:
        station.holders.add(holder)
        station.pausing.append(holder)
        station.engine.pause(self.clock.now, mode, clear_cache)
        self._changed[station] = None

    def _release(self, station: Station, holder: str) -> None:
        station.holders.discard(holder)
        if not station.holders:
            station.engine.resume(self.clock.now)
            self._changed[station] = None

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
        work = Work(
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
        station = self._stations[action.instance]
        station.engine.submit(work, self.clock.now)
        self._changed[station] = None

    def _interrupt(self, action: Interrupt) -> None:
        station = self._stations[action.instance]
        station.engine.abort(action.attempt, self.clock.now)
        self._changed[station] = None

    def _pause(self, action: Pause) -> None:
        station = self._stations[action.instance]
        self._hold(station, "scheduler", action.mode, action.clear_cache)

    def _resume(self, action: Resume) -> None:
        self._release(self._stations[action.instance], "scheduler")

    def _update_weights(self, action: UpdateWeights) -> None:
        self.clock.after(self.scenario.weights.seconds, self._loaded, action)

    def _loaded(self, action: UpdateWeights) -> None:
        self._stations[action.instance].engine.set_version(action.version, self.clock.now)
        self._tell(WeightsUpdated(action.instance, action.version))

    def _deliver(self, action: Deliver) -> None:
        if self._streams:
            for sample in action.samples:
                self._streams.pop(sample.request, None)
        trainer = self.scenario.trainer
        if not trainer.colocated:
            self._begin_training(action)
            return
        self._batch, self._to_stop = action, len(self._stations)
        for station in self._stations.values():
            self._hold(station, "trainer", "keep", not trainer.keeps_kv)

    def _stopped(self) -> None:
        """An instance made way for the colocated trainer, which waits for the last to do so."""
        self._to_stop -= 1
        if not self._to_stop and self._batch is not None:
            self._begin_training(self._batch)

    def _begin_training(self, action: Deliver) -> None:
        tokens = sum(s.prompt_tokens + s.response_tokens for s in action.samples)
        self.clock.after(self.scenario.trainer.step_s(tokens), self._train, action)

    def _train(self, action: Deliver) -> None:
        """The training step is over."""
        self.trained += len({sample.group for sample in action.samples})
        if self.trained >= len(self.workload.prompts):
            return
        if self.scenario.trainer.colocated:
            for station in self._stations.values():
                self._release(station, "trainer")
        self._tell(WeightsPublished(action.version + 1))
        self._tell(BatchRequested())

    def _discard(self, action: Discard) -> None:
        """A simulated instance keeps no tokens for us, only the name of the text."""
        if action.ends:
            self._streams.pop(action.request, None)

    def _wake(self, action: Wake) -> None:
        self.clock.at(action.at, lambda _: self._tell(Woke()))

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
