"""The simulated trainer: submits its prompts, waits for batches, trains them, publishes weights.
Rewards of its samples come from `SimRewards`.

It takes a batch in parts if the policy delivers parts. On its own GPUs it trains parts as they
arrive, and its step ends (`fixed_s`) when the batch is whole and trained. On the instances' GPUs it
begins when instances have stopped for it: all of them once the batch is whole, some earlier if they
are lent.
"""

from __future__ import annotations

from collections.abc import Callable

from rollout_sched.core import SchedulerView
from rollout_sched.core.model.actions import Deliver, Discard, Dispatch, Judge, Lend, Reclaim
from rollout_sched.core.model.events import (
    BatchRequested,
    Ending,
    Event,
    GroupJudged,
    InstanceReturned,
    SubmissionsClosed,
    WeightsPublished,
)
from rollout_sched.core.model.records import DeliveredSample
from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.replay.fleet import SharedGpus
from rollout_sched.simulators.replay.links import SimWeights
from rollout_sched.simulators.replay.scenario import RewardModel, TrainerModel
from rollout_sched.simulators.replay.workload import Workload


class PartTraining:
    """A training step that begins before its batch is whole, on any share of the GPUs: work in
    seconds (the time on all GPUs) that arrives in parts and is done as it arrives.

    Gradients accumulate, so the order of the parts and their boundaries do not matter.

    share  of the GPUs that trains at the beginning
    """

    __slots__ = ("_done_s", "_share", "_since", "_work_s")

    def __init__(self, share: float) -> None:
        self._work_s = 0.0
        self._done_s = 0.0
        self._share = share
        self._since = 0.0

    def add(self, seconds: float, now: float) -> None:
        """More work has arrived."""
        self._settle(now)
        self._work_s += seconds

    def set_share(self, share: float, now: float) -> None:
        """From now on this share of the GPUs trains."""
        self._settle(now)
        self._share = share

    def left_s(self, now: float) -> float:
        """The work left of all that has arrived, in seconds on all GPUs."""
        self._settle(now)
        return self._work_s - self._done_s

    def _settle(self, now: float) -> None:
        self._done_s = min(self._work_s, self._done_s + (now - self._since) * self._share)
        self._since = now


class SimTrainer:
    """Trains every group of the workload.

    left     groups that are neither trained nor lost yet
    over_at  time of the latest group trained or lost, in seconds

    `judged`: whether its groups are judged before it gets them.
    """

    def __init__(
        self,
        model: TrainerModel,
        workload: Workload,
        gpus: SharedGpus,
        weights: SimWeights,
        queue: EventQueue,
        tell: Callable[[Event], None],
        *,
        judged: bool = False,
    ) -> None:
        self._judged = judged
        self.left = len(workload.groups)
        self.over_at = 0.0
        self._model = model
        self._workload = workload
        self._gpus = gpus
        self._weights = weights
        self._queue = queue
        self._tell = tell
        self._work = PartTraining(0.0 if model.colocated else 1.0)
        self._last: Deliver | None = None  # of a whole batch, until all GPUs are free
        self._request = BatchRequested(parts=True, shares_gpus=model.colocated)
        self._in_step = 0  # groups of the current batch that have arrived
        self._lost: set[str] = set()

    @property
    def standing(self) -> str:
        groups = len(self._workload.groups)
        return f"{groups - self.left} of {groups} groups trained"

    def start(self) -> None:
        if not self.left:
            return  # without training
        last = 0.0
        for group in self._workload.groups:
            arrival = self._workload.arrival_s(group)
            last = max(last, arrival)
            if arrival > 0:
                self._queue.at(arrival, self._submit, group)
            else:
                self._submit(group)
        self._queue.at(last, self._tell, SubmissionsClosed())
        self._queue.at(0.0, self._tell, self._request)
        self._gpus.on_stopped = self._complete
        self._gpus.on_lent = self._lent_changed

    def deliver(self, action: Deliver) -> None:
        tokens = sum(s.prompt_tokens + s.response_tokens for s in action.samples)
        self._work.add(self._model.step_s(tokens, last=False), self._queue.now)
        self._in_step += len({sample.group for sample in action.samples})
        if not action.last:
            return
        self._last = action
        if self._model.colocated:
            self._gpus.stop_all(clear_cache=not self._model.keeps_kv)
        else:
            self._complete()

    def discard(self, action: Discard) -> None:
        """A group that failed or was filtered will not arrive."""
        lost = action.group and action.reason in ("failed", "filtered")
        if lost and action.group not in self._lost:
            self._lost.add(action.group)
            self._finish(1)

    def take(self, action: Lend) -> None:
        """An instance is lent before the batch is whole."""
        self._gpus.lend(action.instance)

    def return_instance(self, action: Reclaim) -> None:
        self._gpus.take_back(action.instance)
        self._tell(InstanceReturned(action.instance))

    def _submit(self, group: str) -> None:
        self._tell(self._workload.submission(group, judged=self._judged))

    def _lent_changed(self) -> None:
        if self._last is None:
            self._work.set_share(self._gpus.lent_share, self._queue.now)

    def _complete(self) -> None:
        """The batch is whole and all GPUs are free: train the rest of it."""
        last, self._last = self._last, None
        if last is not None:
            now = self._queue.now
            self._work.set_share(1.0, now)
            seconds = self._model.fixed_s + self._work.left_s(now)
            self._queue.after(seconds, self._step, last.version)

    def _step(self, version: int) -> None:
        """The training step is over."""
        groups, self._in_step = self._in_step, 0
        self._work = PartTraining(0.0 if self._model.colocated else 1.0)
        self._finish(groups)
        if self._model.colocated and (self.left or self._workload.traffic is not None):
            for instance in self._gpus.resume_all():
                self._tell(InstanceReturned(instance))
        if self.left:
            self._weights.publish(version + 1, self._published)

    def _published(self, version: int) -> None:
        self._tell(WeightsPublished(version))
        self._tell(self._request)

    def _finish(self, groups: int) -> None:
        self.left -= groups
        self.over_at = self._queue.now


# ------------------------------------------------------------------------------------------
# Rewards.


class SimRewards:
    """When the reward of each finished sample is known, and the answer to each Judge.

    `verdict`: the recorded one on a group. `view`: that of the current scheduler.
    """

    def __init__(
        self,
        model: RewardModel,
        seed: int,
        verdict: Callable[[str], str | None],
        queue: EventQueue,
        view: Callable[[], SchedulerView],
        tell: Callable[[Event], None],
    ) -> None:
        self._model = model
        self._seed = seed
        self._verdict = verdict
        self._queue = queue
        self._view = view
        self._tell = tell
        self._known_at: dict[str, float] = {}  # by request

    def look(self, event: Event) -> None:
        """If the event finishes a request, its reward starts at once."""
        if isinstance(event, Ending):
            sample = self._view().to_judge(event.request)
            if sample is not None:
                self._begin(sample)

    def settle(self, action: Judge) -> None:
        """Answer when all rewards of the group are known."""
        at = max([self._begin(sample) for sample in action.samples])
        self._queue.at(max(at, self._queue.now), self._answer, action)

    def forget(self, action: Dispatch | Discard) -> None:
        """The request is discarded or continues, so its reward is void."""
        if isinstance(action, Dispatch) or not action.attempt:
            self._known_at.pop(action.request, None)

    def deliver(self, action: Deliver) -> None:
        for sample in action.samples:
            self._known_at.pop(sample.request, None)

    def _begin(self, sample: DeliveredSample) -> float:
        at = self._known_at.get(sample.request)
        if at is None:
            at = self._queue.now + self._model.seconds_of(sample, self._seed)
            self._known_at[sample.request] = at
        return at

    def _answer(self, action: Judge) -> None:
        if self._view().is_judged(action.group, action.judgement):
            recorded = self._verdict(action.group)
            drawn = self._model.keeps(action.group, self._seed)
            kept = drawn if recorded is None else recorded == "kept"
            verdict = GroupJudged(action.group, action.judgement, "kept" if kept else "filtered")
            self._tell(verdict)
