"""The closed loop: one scheduler, simulated instances, and the consumers of their output: a trainer
that waits for batches, clients that wait for answers.

This is a driver like the live one: it carries out actions and reports facts. Through it the
scheduler sees only what a real fleet reports: answers, polls, streams, confirmations. All events of
the scheduler can occur: those of clients if the scenario has [traffic], those of leaving instances
and of failing attempts and tools if it has [[faults]]. TrajectoryEnded is reported only for tools
that fail: a recorded trajectory is over when its last turn is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from rollout_sched.core import FactRecorder, FoldedFacts, SchedulerView
from rollout_sched.core.errors import CallerError, PolicyError
from rollout_sched.core.model.actions import (
    Action,
    Answer,
    Deliver,
    Discard,
    Dispatch,
    Interrupt,
    Judge,
    Lend,
    Pause,
    Reclaim,
    Release,
    Resume,
    UpdateWeights,
    Wake,
)
from rollout_sched.core.model.events import (
    Event,
    RequestSubmitted,
    RequestWithdrawn,
    Restored,
    SessionEnded,
    TokensArrived,
    Woke,
)
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.simulators.replay.attempts import SimAttempts
from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.replay.faults import Faults, SchedulerRestarts
from rollout_sched.simulators.replay.fleet import SimFleet, SimMembership
from rollout_sched.simulators.replay.links import SimLinks
from rollout_sched.simulators.replay.scenario import (
    Conversation,
    RewardModel,
    Scenario,
    Traffic,
    Visibility,
)
from rollout_sched.simulators.replay.sim_trainer import SimRewards, SimTrainer
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.model import SampleRecord


class SimClients:
    """The simulated clients: they ask, wait, ask again after an answer, and leave. Has all
    conversations of a run, each from its arrival to its last answer.

    left  conversations that are not over, including those that have not started
    """

    def __init__(
        self,
        traffic: Traffic | None,
        attempts: SimAttempts,
        queue: EventQueue,
        tell: Callable[[Event], None],
    ) -> None:
        self.left = 0 if traffic is None else len(traffic)
        self._traffic = traffic
        self._patience_s = 0.0 if traffic is None else traffic.patience_s
        self._max_tokens = 0 if traffic is None else traffic.max_tokens
        self._asking = attempts.asking
        self._queue = queue
        self._tell = tell
        self._requests = 0

    @property
    def standing(self) -> str:
        return f" and {self.left} conversations not finished" if self.left else ""

    def start(self) -> None:
        if self._traffic is not None:
            for conversation in self._traffic.conversations():
                self._queue.at(conversation.arrival_s, self._ask, conversation)

    def answer(self, action: Answer) -> None:
        conversation = self._asking.pop(action.sample.request)
        thinks_s = conversation.answered(action.sample.response_tokens)
        if thinks_s is None:
            self._go(conversation)
        else:
            self._queue.after(thinks_s, self._ask, conversation)

    def discard(self, action: Discard) -> None:
        """A request has ended without an answer: its client leaves."""
        conversation = self._asking.pop(action.request, None)
        if conversation is not None:
            self._go(conversation)

    def break_off(self) -> None:
        """Waiting clients get no answer; they ask again at once."""
        waiting = list(self._asking.values())
        self._asking.clear()
        for conversation in waiting:
            self._queue.after(0.0, self._ask, conversation)

    def _ask(self, conversation: Conversation) -> None:
        self._requests += 1
        request = f"direct.{self._requests}"
        self._asking[request] = conversation
        if self._patience_s:
            self._queue.after(self._patience_s, self._lose_patience, request)
        self._tell(
            RequestSubmitted(
                request,
                conversation.group,
                conversation.context_tokens,
                self._max_tokens,
                conversation.session,
            )
        )

    def _lose_patience(self, request: str) -> None:
        if request in self._asking:
            self._tell(RequestWithdrawn(request))

    def _go(self, conversation: Conversation) -> None:
        self.left -= 1
        if conversation.session and conversation.turn:  # else the scheduler may not know it
            self._tell(SessionEnded(conversation.session))


class Telemetry:
    """Polls every instance and reads every stream at fixed intervals, while there is work: idle
    time costs nothing, however long.

    ticks  how many of its own callbacks are in the queue; they do not count as progress of a run
    """

    def __init__(
        self,
        visibility: Visibility,
        fleet: SimFleet,
        attempts: SimAttempts,
        queue: EventQueue,
        tell: Callable[[Event], None],
    ) -> None:
        self.ticks = 0
        self._visibility = visibility
        self._fleet = fleet
        self._attempts = attempts
        self._queue = queue
        self._tell = tell
        self._asleep: list[tuple[float, float, Callable[[], None]]] = []  # since, interval, what

    def start(self) -> None:
        if self._visibility.poll_s:
            self._tick(0.0, self._visibility.poll_s, self.report)
        if self._visibility.stream_s:
            self._tick(0.0, self._visibility.stream_s, self._stream)

    def wake(self) -> None:
        """Go on in the same rhythm if there is work again."""
        if self._asleep and not self._is_idle():
            for since, seconds, callback in self._asleep:
                periods = (self._queue.now - since) // seconds
                self._tick(since + periods * seconds, seconds, callback)
            self._asleep.clear()

    def _is_idle(self) -> bool:
        """Whether nothing is left to say; a paused instance says nothing until it goes on."""
        paused = any(node.paused_by for node in self._fleet.nodes.values())
        return not (len(self._attempts) or paused)

    def report(self) -> None:
        for node in list(self._fleet.nodes.values()):
            self._fleet.catch_up(node)
            if not node.paused_by:  # a paused vLLM's gauges freeze
                self._tell(node.report())

    def _stream(self) -> None:
        for node in list(self._fleet.nodes.values()):
            self._fleet.catch_up(node)
            for attempt, tokens in node.instance.progress(self._queue.now).items():
                if attempt in self._attempts:  # else it has failed and is being removed
                    self._tell(TokensArrived(self._attempts.request_of(attempt), attempt, tokens))

    def _tick(self, since: float, seconds: float, callback: Callable[[], None]) -> None:
        def again(_: Any) -> None:
            self.ticks -= 1
            callback()
            now = self._queue.now
            if self._is_idle():
                self._asleep.append((now, seconds, callback))
            else:
                self._tick(now, seconds, callback)

        self.ticks += 1
        self._queue.at(since + seconds, again)


class Restarts:
    """Restarts the scheduler of a replay: records what a scheduler must remember, and makes the
    next one from that alone.

    `make`: makes a fresh scheduler of the same policy. `anomalies` are those of the schedulers that
    have died.
    """

    def __init__(self, scheduler: Scheduler, make: Callable[[], Scheduler]) -> None:
        self.anomalies: Counter[str] = Counter()
        self._scheduler = scheduler
        self._make = make
        self._recorder = FactRecorder(scheduler)
        self._folded = FoldedFacts()

    def observe(self, now: float, event: Event, actions: Sequence[Action]) -> None:
        self._recorder.observe(now, event, actions)

    def restart(self) -> tuple[Scheduler, Restored]:
        """The scheduler that continues, and the first event it must get."""
        changes = self._recorder.changes()
        if changes is not None:
            self._folded.add(changes)
        self.anomalies.update(self._scheduler.view.anomalies)
        event = Restored(self._folded.state)
        self._scheduler = scheduler = self._make()
        self._recorder, self._folded = FactRecorder(scheduler), FoldedFacts()
        return scheduler, event


Observer = Callable[[float, Event, list[Action]], None]


class ClosedLoop:
    """One run of one policy over one workload; `run` returns the seconds it took.

    Every observer sees every (now, event, actions); together these describe the run completely.
    `successor` makes a fresh scheduler of the same policy. It is required if the scenario restarts
    the scheduler.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        workload: Workload,
        scenario: Scenario,
        observers: Sequence[Observer] = (),
        *,
        successor: Callable[[], Scheduler] | None = None,
    ) -> None:
        workload.check_fits(scenario)
        self.scheduler = scheduler
        self._restarts = _restarts(scheduler, scenario, successor)
        self._observers = tuple(observers)
        self._inbox: deque[Event] = deque()
        self._telling = False
        self._queue = queue = EventQueue()
        self._attempts = attempts = SimAttempts(workload)
        self._links: SimLinks | None = None
        if scenario.links is not None:
            self._links = SimLinks(scenario.links, workload.seed, queue, self._tell)
        self._fleet = SimFleet(scenario, attempts, queue, self._tell, self._is_acting, self._links)
        self._membership = SimMembership(scenario, self._fleet, attempts, queue, self._tell)
        rewards = scenario.rewards or (RewardModel() if workload.judged else None)
        gpus, weights = self._fleet.gpus, self._fleet.weights
        self._trainer = SimTrainer(
            scenario.trainer, workload, gpus, weights, queue, self._tell, judged=rewards is not None
        )
        self._rewards: SimRewards | None = None
        if rewards is not None:
            self._rewards = SimRewards(
                rewards,
                workload.seed,
                workload.verdict,
                queue,
                self._view,
                self._tell,
            )
        self._telemetry = Telemetry(scenario.visibility, self._fleet, attempts, queue, self._tell)
        self._clients = SimClients(workload.traffic, attempts, queue, self._tell)
        self._faults = Faults(scenario.faults, queue, self._membership, self._restart)
        self._do = self._table()

    def run(self) -> float:
        """Run until every prompt is trained and every client has its answer or has disconnected.
        Returns the seconds that the training took; without training, those of the whole run.

        Raises PolicyError if the run cannot continue because of the policy, CallerError if because
        the scenario left no instance.
        """
        self._membership.start(self._faults.absent)
        self._trainer.start()
        self._telemetry.start()
        self._clients.start()
        self._faults.start()
        queue, fleet, trainer, clients = self._queue, self._fleet, self._trainer, self._clients
        telemetry = self._telemetry
        while trainer.left or clients.left:
            if len(queue) <= telemetry.ticks:
                raise self._standstill()
            queue.step()
            if fleet.changed:
                fleet.plan_changed()
            telemetry.wake()
        telemetry.report()
        self._take_apart()
        return trainer.over_at or queue.now

    @property
    def training(self) -> bool:
        """Whether a prompt is left to be trained."""
        return self._trainer.left > 0

    @property
    def anomalies(self) -> dict[str, int]:
        """The anomalies of all schedulers of this run."""
        earlier = Counter[str]() if self._restarts is None else self._restarts.anomalies
        return dict(Counter(self.scheduler.view.anomalies) + earlier)

    @property
    def sent_bytes(self) -> dict[str, float]:
        """Of new weights, by the trainer, for each link of the scenario's network."""
        return self._fleet.weights.sent_bytes

    def _standstill(self) -> Exception:
        at = (
            f"deadlock: no event is left at {self._queue.now:.3f} s, with {self._trainer.standing}"
            f"{self._clients.standing}"
        )
        if not self._fleet.nodes:
            return CallerError(
                f"{at}: every instance is gone; set returns_after_s in one of the [[faults]]"
            )
        return PolicyError(at)

    def _take_apart(self) -> None:
        """Break reference cycles, so that memory is freed without the garbage collector."""
        self._queue.clear()
        self._fleet.close()
        self._do.clear()

    # -- telling the scheduler -------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        """Handle the event. Events that it causes are handled after all its actions are done."""
        if self._telling:
            self._inbox.append(event)
            return
        self._telling = True
        self._handle(event)
        while self._inbox:
            self._handle(self._inbox.popleft())
        self._telling = False

    def _handle(self, event: Event) -> None:
        now, do = self._queue.now, self._do
        actions = self.scheduler.handle(event, now)
        if self._restarts is not None:
            self._restarts.observe(now, event, actions)
        for observer in self._observers:
            observer(now, event, actions)
        if self._rewards is not None:
            self._rewards.look(event)
        for action in actions:
            do[type(action)](action)

    def _view(self) -> SchedulerView:
        return self.scheduler.view

    def _is_acting(self, request: str, attempt: int) -> bool:
        return self.scheduler.view.is_acting(request, attempt)

    def _restart(self) -> None:
        """The scheduler dies, and another one continues."""
        assert self._restarts is not None, "a restart that is not in the scenario"
        self._fleet.break_off()
        self.scheduler, restored = self._restarts.restart()
        self._tell(restored)
        self._membership.join_again()
        self._clients.break_off()

    # -- carrying out actions --------------------------------------------------------------

    def _table(self) -> dict[type[Any], Callable[[Any], None]]:
        fleet, links = self._fleet, self._links
        return {
            Dispatch: self._dispatch if links is None else links.down(self._dispatch),
            Interrupt: fleet.interrupt if links is None else links.down(fleet.interrupt),
            Pause: fleet.pause,
            Resume: fleet.resume,
            Release: self._membership.release,
            UpdateWeights: fleet.update_weights,
            Lend: self._trainer.take,
            Reclaim: self._trainer.return_instance,
            Judge: self._judge,
            Deliver: self._deliver,
            Answer: self._clients.answer,
            Discard: self._discard,
            Wake: self._wake,
        }

    def _dispatch(self, action: Dispatch) -> None:
        if self._rewards is not None:
            self._rewards.forget(action)
        self._fleet.dispatch(action)

    def _judge(self, action: Judge) -> None:
        assert self._rewards is not None, "Judge without [rewards]"
        self._rewards.settle(action)

    def _deliver(self, action: Deliver) -> None:
        if self._rewards is not None:
            self._rewards.deliver(action)
        self._attempts.forget(sample.request for sample in action.samples)
        self._trainer.deliver(action)

    def _discard(self, action: Discard) -> None:
        """A simulated instance keeps only the name of the text, no tokens."""
        if self._rewards is not None:
            self._rewards.forget(action)
        if action.ends:
            self._attempts.forget((action.request,))
            self._trainer.discard(action)
            self._clients.discard(action)

    def _wake(self, action: Wake) -> None:
        self._queue.at(action.at, self._tell, Woke())


def _restarts(
    scheduler: Scheduler, scenario: Scenario, successor: Callable[[], Scheduler] | None
) -> Restarts | None:
    """None without restarts: then no facts need to be recorded."""
    if successor is None or not any(isinstance(f, SchedulerRestarts) for f in scenario.faults):
        return None
    return Restarts(scheduler, successor)


#: Called at each delivery with the number of groups delivered.
Progress = Callable[[int], None]


class RunNotes:
    """An observer of one run.

    delivered  the samples of each batch, as recorded
    in_parts   training overlaps with the generation of its own batch
    events     the number of events
    """

    def __init__(
        self, policy: str, workload: Workload, progress: Progress | None, give_up_s: float
    ) -> None:
        self.delivered: list[list[SampleRecord]] = []
        self.in_parts = False
        self.events = 0
        self._policy = policy
        self._workload = workload
        self._progress = progress
        self._give_up_s = give_up_s

    def observe(self, now: float, event: Event, actions: list[Action]) -> None:
        """Raises PolicyError if the run lasts longer than `give_up_s`."""
        self.events += 1
        if now > self._give_up_s:
            raise PolicyError(f"{self._policy}: run not finished after {self._give_up_s:.0f} s")
        for action in actions:
            if type(action) is Lend:
                self.in_parts = True
            elif type(action) is Deliver:
                self._deliver(action)

    def _deliver(self, action: Deliver) -> None:
        self.in_parts |= not action.last
        if action.part == 0:
            self.delivered.append([])
        self.delivered[-1] += [self._workload.sample(s.group, s.index) for s in action.samples]
        if self._progress is not None:
            self._progress(len({sample.group for sample in action.samples}))
