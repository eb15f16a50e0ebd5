"""The simulated trainer: submits its prompts, waits for batches, trains them, publishes weights.

On GPUs of its own it takes a batch in parts, where the policy hands them out, trains them one after
the other as they come, and takes its step (`fixed_s`) when the last is trained. On the instances'
GPUs it can only begin when they have made way, so it takes batches as a whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rollout_sched.core.actions import Deliver, Discard, Lend, Reclaim
from rollout_sched.core.events import (
    BatchRequested,
    Event,
    InstanceReturned,
    SubmissionsClosed,
    WeightsPublished,
)
from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.replay.shared_gpus import SharedGpus
from rollout_sched.simulators.replay.trainer import TrainerModel
from rollout_sched.simulators.replay.workload import Workload


class SimTrainer:
    """Trains every group of the workload.

    left     groups that are neither trained nor given up yet
    over_at  when the last of them was, in seconds
    """

    def __init__(
        self,
        model: TrainerModel,
        workload: Workload,
        gpus: SharedGpus,
        queue: EventQueue,
        tell: Callable[[Event], None],
    ) -> None:
        self.left = len(workload.groups)
        self.over_at = 0.0
        self._model = model
        self._workload = workload
        self._gpus = gpus
        self._queue = queue
        self._tell = tell
        self._request = BatchRequested(parts=not model.colocated)
        self._parts: deque[Deliver] = deque()  # of the present batch, not trained yet
        self._training = False
        self._in_step = 0  # prompts of the present batch that are trained
        self._failed: set[str] = set()

    @property
    def standing(self) -> str:
        groups = len(self._workload.groups)
        return f"{groups - self.left} of {groups} groups trained"

    def start(self) -> None:
        if not self.left:
            return  # nobody trains here
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
        self._gpus.on_stopped = self._train_next

    def deliver(self, action: Deliver) -> None:
        self._parts.append(action)
        if self._model.colocated:
            self._gpus.stop_all(clear_cache=not self._model.keeps_kv)
        else:
            self._train_next()

    def discard(self, action: Discard) -> None:
        """A group that has failed will never come."""
        if action.reason == "failed" and action.group and action.group not in self._failed:
            self._failed.add(action.group)
            self._finish(1)

    def take(self, action: Lend) -> None:
        """An instance makes way before the batch is whole."""
        self._gpus.lend(action.instance)

    def give_back(self, action: Reclaim) -> None:
        self._gpus.take_back(action.instance)
        self._tell(InstanceReturned(action.instance))

    def _submit(self, group: str) -> None:
        self._tell(self._workload.submission(group))

    def _train_next(self) -> None:
        """The part that came first, unless another is being trained."""
        if self._parts and not self._training:
            self._training = True
            part = self._parts.popleft()
            tokens = sum(s.prompt_tokens + s.response_tokens for s in part.samples)
            self._queue.after(self._model.step_s(tokens, last=part.last), self._trained, part)

    def _trained(self, part: Deliver) -> None:
        self._training = False
        self._in_step += len({sample.group for sample in part.samples})
        if part.last:
            self._step(part.version)
        else:
            self._train_next()

    def _step(self, version: int) -> None:
        """The training step is over."""
        prompts, self._in_step = self._in_step, 0
        self._finish(prompts)
        if self._model.colocated and (self.left or self._workload.traffic is not None):
            for instance in self._gpus.resume_all():
                self._tell(InstanceReturned(instance))
        if self.left:
            self._tell(WeightsPublished(version + 1))
            self._tell(self._request)

    def _finish(self, groups: int) -> None:
        self.left -= groups
        self.over_at = self._queue.now
