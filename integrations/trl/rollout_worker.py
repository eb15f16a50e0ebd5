"""Generates AsyncGRPOTrainer's rollouts with a scheduler, in parallel to the training."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from rollout_sched.client import Batch, BlockingRollouts, RolloutScheduler, Sample, Tool
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.trl.rollout_func import Prompts
from rollout_sched.integrations.trl.scoring import RewardFunc, Scores, score

log = logging.getLogger(__name__)

#: Seconds between two checks whether the trainer has taken all samples.
POLL_S = 0.02

#: Seconds between two checks for failed prompts.
FAILED_S = 1.0

#: Default number of batches of prompts that are submitted in advance.
BATCHES_AHEAD = 4

Row = Mapping[str, Any]


class RolloutWorker:
    """AsyncGRPOTrainer's `rollout_worker` (`RolloutWorkerProtocol` of TRL 1.16).

        scheduler = RolloutScheduler.from_toml("areal", urls, prompts_per_step=8)
        with scheduler.blocking() as ours:
            trainer = AsyncGRPOTrainer(
                ...,
                rollout_worker=RolloutWorker(ours, dataset, [reward], tokenizer, args),
                weight_transfer=CheckpointTransfer(ours, "/shared/weights"),
            )
            trainer.train()

    rollouts          the scheduler; its batch should be what the trainer takes between two updates
    dataset           rows with `prompt` (text or messages), used in order and from the start again
    reward_funcs      as in TRL: plain or coroutine functions of `prompts`, `completions`,
                      `completion_ids` and the other columns, which return a reward or None for
                      each; the scheduler's own reward, if it has one, counts as one of them
    processing_class  the tokenizer, or the processor
    args              the trainer's AsyncGRPOConfig
    tool              called between the turns of each completion, see `RolloutScheduler.submit`
    prompts_ahead     prompts to submit in advance, from which the scheduler's policy chooses

    The worker requests the next batch when the trainer has taken all of the last one. TRL fetches
    one batch ahead, so that batch is trained one version later than the scheduler assumes.

    rollout_buffer  RolloutSamples for the trainer
    metrics_queue   a dict for each batch
    """

    def __init__(
        self,
        rollouts: BlockingRollouts,
        dataset: Iterable[Row],
        reward_funcs: Sequence[RewardFunc],
        processing_class: Any,
        args: Any,
        *,
        tool: Tool | None = None,
        prompts_ahead: int = 0,
    ) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._rollouts = rollouts
        self._feed = _Feed(dataset, Prompts(args, processing_class), args.num_generations, tool)
        self._reward_funcs = reward_funcs
        self._processing_class = processing_class
        self._prompts_ahead = prompts_ahead
        self._ahead_of_ours = 0
        self._work: Future[None] | None = None

    def start(self) -> None:
        """Start; the scheduler keeps working while the trainer trains."""
        self._work = self._rollouts.start(self._produce)

    def stop(self) -> None:
        """Stop the worker; the scheduler is not closed."""
        if self._work is not None:
            self._work.cancel()
            self._work = None

    def update_model_version(self, model_version: int) -> None:
        """Record TRL's number of the version that is the scheduler's newest."""
        self._ahead_of_ours = model_version - self._rollouts.state()["version"]

    def check_health(self, stale_after_s: float) -> None:
        """Raises RuntimeError if the rollouts have ended or the scheduler does not answer within
        `stale_after_s` seconds. The duration of a rollout does not count."""
        if self._work is None or self._work.done():
            error = self._work.exception() if self._work is not None else None
            raise RuntimeError("the rollouts have ended") from error
        try:
            state = self._rollouts.start(lambda rollouts: rollouts.state()).result(stale_after_s)
        except TimeoutError as error:
            raise RuntimeError(f"no answer from the scheduler within {stale_after_s} s") from error
        if state["broken"]:
            raise RuntimeError(f"the scheduler is broken: {state['broken']}")

    async def _produce(self, rollouts: RolloutScheduler) -> None:
        batch_size = (await rollouts.state())["prompts_per_step"]
        ahead = self._prompts_ahead or BATCHES_AHEAD * batch_size
        while True:
            await self._feed.fill(rollouts, ahead)
            while self.rollout_buffer.qsize():
                await asyncio.sleep(POLL_S)
            await self._hand_over(await self._next_batch(rollouts, ahead))

    async def _next_batch(self, rollouts: RolloutScheduler, ahead: int) -> Batch:
        """The next batch. Prompts that fail meanwhile are replaced, because otherwise the batch
        might never be complete. If `ahead` prompts have failed, it is assumed that all will."""
        coming = asyncio.create_task(rollouts.next_batch())
        try:
            while not (await asyncio.wait({coming}, timeout=FAILED_S))[0]:
                state = await rollouts.state()
                failed = state["failed"]
                self._feed.leave_out(failed)
                self._feed.filtered(state["filtered"])
                if len(failed) >= ahead:
                    raise CallerError(f"all prompts fail: {next(iter(failed.values()))}")
                await self._feed.fill(rollouts, ahead)
        finally:
            coming.cancel()
        batch = await coming
        if batch is None:
            raise CallerError("submissions are closed: the worker needs its own scheduler")
        return batch

    async def _hand_over(self, batch: Batch) -> None:
        self._feed.leave_out({failed.uid: failed.reason for failed in batch.failed})
        self._feed.filtered(batch.filtered)
        self.metrics_queue.put(_metrics(batch))
        for samples in batch.groups().values():
            number, row = self._feed.take(samples[0].uid)
            scores = await score(self._reward_funcs, row, samples, self._processing_class)
            for rollout in _rollout_samples(samples, row["prompt"], scores, number, batch.version):
                rollout.model_version += self._ahead_of_ours
                self.rollout_buffer.put(rollout)


class _Feed:
    """Submits the data set's prompts in order, again and again, and tracks those in flight."""

    def __init__(
        self, dataset: Iterable[Row], prompts: Prompts, samples: int, tool: Tool | None
    ) -> None:
        self._rows = itertools.cycle(dataset)
        self._prompts = prompts
        self._samples = samples
        self._tool = tool
        self._submitted = 0
        self._here: dict[str, tuple[int, Row]] = {}

    async def fill(self, rollouts: RolloutScheduler, ahead: int) -> None:
        """Submit until `ahead` prompts are in flight. Raises CallerError if the data set has no
        rows."""
        first = self._submitted
        rows = list(itertools.islice(self._rows, ahead - len(self._here)))
        if not rows and not self._here:
            raise CallerError("the data set has no rows")
        texts = [row["prompt"] for row in rows]
        groups = await asyncio.to_thread(self._prompts.groups_of, texts, self._samples, first)
        for number, (group, row) in enumerate(zip(groups, rows, strict=True), first):
            self._here[group.uid] = number, row
        self._submitted += len(groups)
        await rollouts.submit(groups, tool=self._tool)

    def leave_out(self, failed: Mapping[str, str]) -> None:
        """Drop the prompts that failed; `failed` has the reasons."""
        for uid in failed.keys() & self._here.keys():
            log.warning("a prompt failed and is skipped: %s", failed[uid])
            del self._here[uid]

    def filtered(self, uids: Iterable[str]) -> None:
        """Drop the prompts whose groups were filtered; others take their places."""
        for uid in uids:
            self._here.pop(uid, None)

    def take(self, uid: str) -> tuple[int, Row]:
        """The number and the row of a delivered prompt."""
        return self._here.pop(uid)


def _rollout_samples(
    samples: Sequence[Sample], prompt: Any, scores: Scores, number: int, version: int
) -> Iterator[Any]:
    """TRL's samples; the version of each, in the scheduler's count, is its oldest, or `version`."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    for index, sample in enumerate(samples):
        before = [0] * len(sample.prompt_ids)
        yield RolloutSample(
            prompt=prompt,
            completion=scores.completions[index],
            input_ids=np.array([*sample.prompt_ids, *sample.response_ids], np.int64),
            completion_mask=np.array([*before, *sample.response_mask], np.int64),
            old_log_probs=np.array([*before, *(sample.rollout_log_probs or [])], np.float32),
            advantage=scores.advantages[index],
            model_version=version if sample.oldest_version is None else sample.oldest_version,
            group_id=number,
            metrics=scores.metrics(index),
            enqueued_at=time.time(),
        )


def _metrics(batch: Batch) -> dict[str, Any]:
    """Metrics for the trainer's log: numbers, and pairs (sum, count) that it adds up."""
    samples = batch.samples
    lengths = [sum(sample.response_mask) for sample in samples]
    truncated = sum(sample.finish_reason == "length" for sample in samples)
    metrics: dict[str, Any] = {
        "rollout/failed_groups_total": float(len(batch.failed)),
        "rollout/filtered_groups_total": float(len(batch.filtered)),
    }
    if samples:
        metrics |= {
            "completions/mean_length": (sum(lengths), len(samples)),
            "completions/max_length": float(max(lengths)),
            "completions/min_length": float(min(lengths)),
            "completions/clipped_ratio": (truncated, len(samples)),
            "rollout/staleness_max": float(max(sample.staleness for sample in samples)),
            "rollout/interruptions_mean": (
                sum(sample.num_interruptions for sample in samples),
                len(samples),
            ),
        }
    return metrics
