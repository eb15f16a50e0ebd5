"""`SimInstance` without the jump: every step is decided, every token counted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rollout_sched.simulators.instance.engine import Inbox, check_pause_mode, last_token
from rollout_sched.simulators.instance.model import (
    Ended,
    InstanceSpec,
    Outcome,
    Paused,
    PauseMode,
    Reason,
    SimGauges,
    SimRequest,
)
from rollout_sched.simulators.instance.reference.blocks import BlockName
from rollout_sched.simulators.instance.reference.scheduler import (
    ReferenceAttempt,
    ReferenceScheduler,
    ReferenceStep,
)

Pause = tuple[PauseMode, bool]


class StepRecord(NamedTuple):
    """The decision for one step, by attempt numbers."""

    scheduled: dict[int, int]
    """attempt -> tokens, in scheduling order"""
    preempted: list[int]
    hits: dict[int, int]
    """attempt -> tokens found in the prefix cache, for those admitted in this step"""


class ReferenceCore:
    """The boundary between two steps, where inputs take effect; the last one was at `at`."""

    def __init__(self, spec: InstanceSpec, version: int, inbox: Inbox) -> None:
        self.scheduler = ReferenceScheduler(spec)
        self.version = version
        self.at = -math.inf
        self.steps = 0
        self.requests: dict[int, ReferenceAttempt] = {}
        self.outcomes: list[Outcome] = []
        self._inbox = inbox
        self._pauses: list[Pause] = []

    def _here(self, numbers: Iterable[int]) -> list[ReferenceAttempt]:
        """The attempts that have arrived and not ended."""
        here = {a.number: a for a in (*self.scheduler.running, *self.scheduler.waiting)}
        return [here[number] for number in numbers if number in here]

    def abort(self, number: int) -> None:
        self._inbox.forget_aborts(self.at)
        for attempt in self._here([number]):
            self._finish(attempt, "abort")
            self._complete_pauses()

    def pause(self, pause: Pause) -> None:
        mode, _ = pause
        if mode == "abort":
            for attempt in self._here(self.requests):
                self._finish(attempt, "abort")
        self.scheduler.admits = False
        self.scheduler.runs = mode != "keep"
        self._pauses.insert(len(self._pauses) if self.scheduler.can_run() else 0, pause)
        self._complete_pauses()

    def set_version(self, version: int) -> None:
        self.version = version

    def complete(self, step: ReferenceStep, end: float) -> None:
        """The results of a step, after the aborts that came while it ran."""
        self.at = end
        self.steps += 1
        for attempt in step.scheduled:
            if attempt.prefilled:
                attempt.tokens += 1
                attempt.versions.append(self.version)
                self.scheduler.counters.generated_tokens += 1
        for attempt in self._here(dict.fromkeys(self._inbox.aborts_within(end))):
            if attempt in step.scheduled and attempt.prefilled:
                attempt.versions.pop()
                self.scheduler.counters.generated_tokens -= 1
            self._finish(attempt, "abort")
        for attempt in list(self.scheduler.running):
            if attempt.tokens == attempt.last_token and attempt.prefilled:
                self._finish(attempt, attempt.reason)
        self._complete_pauses()

    def _finish(self, attempt: ReferenceAttempt, reason: Reason) -> None:
        self.scheduler.remove(attempt)
        del self.requests[attempt.number]
        made = len(attempt.versions)
        self.outcomes.append(Ended(attempt.number, made, attempt.spans(made), reason, self.at))

    def _complete_pauses(self) -> None:
        if not self.scheduler.can_run():
            for mode, clear_cache in self._pauses:
                if clear_cache:
                    self.scheduler.clear_cache(preempt=True)
                self.outcomes.append(Paused(mode, self.at))
            self._pauses.clear()


class ReferenceInstance:
    """Does what `SimInstance` does, whose docstrings hold for it; `last_step` is the last decision.
    `next_at` includes every step."""

    def __init__(self, spec: InstanceSpec, version: int = 0) -> None:
        self.spec = spec
        self.last_step: StepRecord | None = None
        self._inbox = Inbox()
        self._core = ReferenceCore(spec, version, self._inbox)
        self._step: ReferenceStep | None = None  # in progress ...
        self._end = 0.0  # ... and its end
        self._busy_s = 0.0
        self._writers: dict[tuple[object, ...], int] = {}  # of each text, by its name

    # -- inputs ----------------------------------------------------------------------------

    def submit(self, request: SimRequest, now: float) -> None:
        end, reason = last_token(request, self.spec)
        number, size = request.attempt, self.spec.block_size
        if number in self._core.requests:
            raise ValueError(f"attempt {number} is already on this instance")
        self._inbox.clock(now)
        attempt = ReferenceAttempt(request, end, reason, self._inbox.count, size)
        writer = self._core.requests.get(self._writers.get(attempt.text, number))
        if writer is not None and not writer.aborted:
            raise ValueError(
                f"attempt {number}: stream {request.stream!r} already has attempt "
                f"{writer.number} here; abort that one or give the copy its own stream"
            )
        self._writers[attempt.text] = number
        self._core.requests[number] = attempt
        self._inbox.post(self._core.scheduler.enqueue, attempt)

    def abort(self, attempt: int, now: float) -> None:
        self._inbox.clock(now)
        self._inbox.post_abort(self._core.abort, attempt)
        if attempt in self._core.requests:
            self._core.requests[attempt].aborted = True

    def pause(self, now: float, mode: PauseMode, clear_cache: bool) -> None:
        check_pause_mode(mode)
        self._inbox.clock(now)
        self._inbox.post(self._core.pause, (mode, clear_cache))

    def resume(self, now: float) -> None:
        self._inbox.clock(now)
        self._inbox.post(self._core.scheduler.reopen)

    def set_version(self, version: int, now: float) -> None:
        self._inbox.clock(now)
        self._inbox.post(self._core.set_version, version)

    def clear_cache(self, now: float, preempt: bool = False) -> None:
        self._inbox.clock(now)
        self._inbox.post(self._core.scheduler.clear_cache, preempt)

    def close(self) -> None:
        """There are no reference cycles to break."""

    # -- time ------------------------------------------------------------------------------

    def next_at(self) -> float:
        at = self._core.at
        if self._step is not None:
            due = self._end
        elif self._inbox.due <= at:
            due = at
        elif self._core.scheduler.can_run():
            due = math.nextafter(at, math.inf)
        else:
            due = self._inbox.due
        return max(due, self._inbox.now)

    def advance(self, now: float) -> list[Outcome]:
        core, inbox = self._core, self._inbox
        inbox.clock(now)
        while True:
            if self._step is not None:
                if self._end > now:
                    break
                step, self._step = self._step, None
                self._busy_s += self._end - core.at
                core.complete(step, self._end)
            elif inbox.due <= core.at:
                inbox.take()
            elif now <= core.at:
                break
            elif core.scheduler.can_run():
                self._step, seconds = core.scheduler.decide()
                self._end = core.at + seconds
                self.last_step = _record(self._step)
            elif inbox.due <= now:
                core.at = inbox.due
            else:
                break
        outcomes, core.outcomes = core.outcomes, []
        return outcomes

    # -- steps -----------------------------------------------------------------------------

    def progress(self, now: float) -> dict[int, int]:
        return {number: len(a.versions) for number, a in self._core.requests.items()}

    def due_step(self, attempt: int, tokens: int) -> int | None:
        live = self._core.requests.get(attempt)
        if live is None or not live.prefilled:
            return None
        return self._core.steps + tokens - len(live.versions)

    def step_at(self, step: int) -> float:
        if step <= self._core.steps:
            return self._core.at
        return self._end if self._step and step == self._core.steps + 1 else math.inf

    def spans_of(self, attempt: int, tokens: int) -> tuple[tuple[int, int], ...]:
        return self._core.requests[attempt].spans(tokens)

    # -- what it shows -----------------------------------------------------------------------

    @property
    def running(self) -> list[int]:
        """The numbers of the running attempts, in order of admission."""
        return [attempt.number for attempt in self._core.scheduler.running]

    @property
    def step_end(self) -> float | None:
        """When the step in progress ends."""
        return None if self._step is None else self._end

    def can_run(self) -> bool:
        return self._core.scheduler.can_run()

    @property
    def version(self) -> int:
        return self._core.version

    def gauges(self) -> SimGauges:
        core, scheduler = self._core, self._core.scheduler
        counters, used = scheduler.counters, self.spec.kv_blocks - len(scheduler.pool.free)
        under_way = self._step is not None or scheduler.can_run()
        return SimGauges(
            len(scheduler.running),
            len(scheduler.waiting),
            used,
            used / self.spec.kv_blocks,
            counters.preemptions,
            counters.prefill_tokens,
            counters.cached_tokens,
            counters.reprefilled_tokens,
            counters.generated_tokens,
            core.steps,
            self._busy_s + (max(0.0, self._inbox.now - core.at) if under_way else 0.0),
        )

    def eviction_order(self) -> Iterator[BlockName]:
        return self._core.scheduler.pool.eviction_order()

    def check_invariants(self) -> None:
        size = self.spec.block_size
        used = set()
        for attempt in self._core.scheduler.running:
            assert len(attempt.blocks) == -(-attempt.computed // size), "blocks are miscounted"
            used.update(attempt.blocks)
        free = len(self._core.scheduler.pool.free)
        assert free + len(used) == self.spec.kv_blocks, "a block is lost or free while in use"


def _record(step: ReferenceStep) -> StepRecord:
    return StepRecord(
        {attempt.number: tokens for attempt, tokens in step.scheduled.items()},
        [attempt.number for attempt in step.preempted],
        {attempt.number: tokens for attempt, tokens in step.hits.items()},
    )
