"""The closed loop: one scheduler, simulated instances, a trainer that waits for its batches.

This is a driver like the live one: it carries out actions and reports facts. The scheduler sees
through it only what a fleet could tell: answers, polls, streams, confirmations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
    SubmissionsClosed,
    TokensArrived,
    WeightsPublished,
    WeightsUpdated,
    Woke,
)
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.simulators.instance.reference.instance import ReferenceInstance
from rollout_sched.simulators.instance.sim_instance import SimInstance
from rollout_sched.simulators.instance.sim_request import Ended
from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.replay.scenario import Scenario
from rollout_sched.simulators.replay.sim_attempts import SimAttempts
from rollout_sched.simulators.replay.sim_node import INFINITY, SimNode
from rollout_sched.simulators.replay.workload import Workload

Observer = Callable[[float, Event, list[Action]], None]


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
        self._attempts = SimAttempts(workload)
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
            _DO[type(action)](self, action)

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
                self._tell(node.report())

    def _stream(self, _: Any) -> None:
        for node in self._nodes.values():
            self._catch_up(node)
            for attempt, tokens in node.instance.progress(self.queue.now).items():
                self._tell(TokensArrived(self._attempts.request_of(attempt), attempt, tokens))

    # -- instances -------------------------------------------------------------------------

    def _catch_up(self, node: SimNode) -> None:
        """Tell what is due: then its counters are those of this very moment."""
        while node.instance.next_at() <= self.queue.now:
            self._advance(node)
        node.instance.advance(self.queue.now)  # nothing is due any more

    def _plan(self, node: SimNode) -> None:
        """Into the event queue when the instance is to be advanced next; older plans are void."""
        node.due = at = node.instance.next_at()
        if at < INFINITY:
            self.queue.at(at, self._due, node)

    def _due(self, node: SimNode) -> None:
        if node.due == self.queue.now:
            self._advance(node)

    def _advance(self, node: SimNode) -> None:
        """Tell what has happened on the instance."""
        self._changed[node] = None
        for outcome in node.instance.advance(self.queue.now):
            if isinstance(outcome, Ended):
                self._answer(outcome)
            elif node.pausing.popleft() == "scheduler":
                self._tell(InstancePaused(node.name))
            else:
                self._stopped()

    def _answer(self, ended: Ended) -> None:
        event, tool = self._attempts.end(ended)
        if tool is not None:
            seconds, returned = tool
            self.queue.after(seconds, self._tell, returned)
        self._tell(event)

    # -- carrying out actions --------------------------------------------------------------

    def _dispatch(self, action: Dispatch) -> None:
        node = self._nodes[action.instance]
        node.instance.submit(self._attempts.begin(action), self.queue.now)
        self._changed[node] = None

    def _interrupt(self, action: Interrupt) -> None:
        node = self._nodes[action.instance]
        node.instance.abort(action.attempt, self.queue.now)
        self._changed[node] = None

    def _pause(self, action: Pause) -> None:
        node = self._nodes[action.instance]
        node.pause("scheduler", self.queue.now, action.mode, action.clear_cache)
        self._changed[node] = None

    def _resume(self, action: Resume) -> None:
        self._resume_for("scheduler", self._nodes[action.instance])

    def _resume_for(self, owner: str, node: SimNode) -> None:
        if node.resume(owner, self.queue.now):
            self._changed[node] = None

    def _update_weights(self, action: UpdateWeights) -> None:
        self.queue.after(self.scenario.weights.seconds, self._loaded, action)

    def _loaded(self, action: UpdateWeights) -> None:
        self._nodes[action.instance].instance.set_version(action.version, self.queue.now)
        self._tell(WeightsUpdated(action.instance, action.version))

    def _deliver(self, action: Deliver) -> None:
        self._attempts.forget(sample.request for sample in action.samples)
        trainer = self.scenario.trainer
        if not trainer.colocated:
            self._begin_training(action)
            return
        self._batch, self._to_stop = action, len(self._nodes)
        for node in self._nodes.values():
            node.pause("trainer", self.queue.now, "keep", not trainer.keeps_kv)
            self._changed[node] = None

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
            self._attempts.forget((action.request,))

    def _wake(self, action: Wake) -> None:
        self.queue.at(action.at, lambda _: self._tell(Woke()))


#: What carries out each action. Outside the class, where compiled methods have no names yet.
_DO: dict[type[Any], Callable[[ClosedLoop, Any], None]] = {
    Dispatch: ClosedLoop._dispatch,
    Interrupt: ClosedLoop._interrupt,
    Pause: ClosedLoop._pause,
    Resume: ClosedLoop._resume,
    UpdateWeights: ClosedLoop._update_weights,
    Deliver: ClosedLoop._deliver,
    Discard: ClosedLoop._discard,
    Wake: ClosedLoop._wake,
}
