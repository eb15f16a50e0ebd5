"""A vLLM instance in virtual time: what its scheduler decides and when, without any token.

Reproduced from vLLM 0.32 (v1/core/sched/scheduler.py) with synchronous scheduling, one kind of
full attention and no speculative decoding. One engine step:

1. Running attempts come first, in the order of their admission: one token each, or the next chunk
   of a prefill, as far as the token budget goes. One that finds no KV block preempts the last
   running one (fcfs) or the worst by (priority, arrival). The victim loses its blocks, returns to
   the head of the queue and is computed again (or found again in the prefix cache) later.
2. If nobody was preempted, queued ones are admitted while there are slots, budget and, for the
   first in line, free blocks for its whole context. Nobody overtakes a blocked first.
3. What the step brings is known at its end: a token for each attempt whose context is complete.

The event jump: between two events the batch stays as it is, so any number of decode steps is one
closed formula (see decode_batch). Nothing is done per token or per running attempt.

Time: whatever arrives at or before a step's end counts for the next step, which is decided
immediately *after* that instant. So what is said does not depend on how often, or in which order,
the methods are called within an instant.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from rollout_sched.simulators.instance.attempt import (
    ARRIVING,
    DECODING,
    OVER,
    PREFILLING,
    WAITING,
    Attempt,
    Ended,
    Reason,
    SimRequest,
    WaitingQueue,
)
from rollout_sched.simulators.instance.cost_model import CostModel
from rollout_sched.simulators.instance.decode_batch import DecodeBatch
from rollout_sched.simulators.instance.kv_blocks import KvBlocks

__all__ = [
    "Ended",
    "InstanceSpec",
    "PauseMode",
    "Paused",
    "SimInstance",
    "SimRequest",
    "StepRecord",
]

PauseMode = Literal["keep", "abort", "wait"]


class InstanceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is fixed when an instance starts; names and defaults are those of vLLM.

    kv_blocks  usable blocks: vLLM's num_gpu_blocks less its null block
    watermark  fraction of the blocks kept free when admitting while others run

    Raises ValueError for settings that vLLM refuses too.
    """

    cost: CostModel
    kv_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131072
    prefix_caching: bool = True
    scheduling: Literal["fcfs", "priority"] = "fcfs"
    watermark: float = 0.0

    def __post_init__(self) -> None:
        for name in ("kv_blocks", "block_size", "max_num_seqs", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"instance: {name} must be >= 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"instance: max_num_batched_tokens ({self.max_num_batched_tokens}) must be "
                f">= max_num_seqs ({self.max_num_seqs})"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"instance: watermark must be in [0, 1), got {self.watermark}")


class Paused(msgspec.Struct):
    """A pause is complete: nothing happens until resume.

    at  when, in seconds
    """

    mode: PauseMode
    at: float


class StepRecord(NamedTuple):
    """What was decided for one step; kept in single-step mode only."""

    scheduled: dict[int, int]
    """attempt -> tokens, in scheduling order"""
    preempted: list[int]
    hits: dict[int, int]
    """attempt -> tokens found in the prefix cache, for those admitted in this step"""


class _Jump(msgspec.Struct, frozen=True, gc=False):
    """So many decode steps from the boundary `step`, which is at `at`, until `end`."""

    step: int
    at: float
    steps: int
    end: float


Saying = list[Ended | Paused]
_RUN_ALL, _RUN_ADMITTED, _RUN_NOTHING = range(3)


class SimInstance:
    """One simulated vLLM instance.

    Inputs (submit, abort, pause, ...) may come at any time not before the last one; they take
    effect at the first step end at or after it, at once if the instance is idle. `next_at` says
    when to call `advance`, which returns what has happened. With single_step=True every step is
    decided on its own by walking through all running attempts: slow, the oracle for the jump.
    """

    # Not for the space: a class with more than thirty attributes has a hash table per object.
    __slots__ = (
        "_aborts",
        "_admissions",
        "_arrivals",
        "_at",
        "_batch",
        "_blocked",
        "_busy_s",
        "_end",
        "_foreseen",
        "_gate",
        "_generated",
        "_idled",
        "_inbox",
        "_kv",
        "_live",
        "_making",
        "_now",
        "_pauses",
        "_plan",
        "_prefilling",
        "_queue",
        "_running",
        "_step",
        "_watermark",
        "cached_tokens",
        "last_step",
        "preemptions",
        "prefill_tokens",
        "reprefilled_tokens",
        "single_step",
        "spec",
        "version",
    )

    def __init__(self, spec: InstanceSpec, version: int = 0, *, single_step: bool = False) -> None:
        self.spec = spec
        self.version = version
        self.single_step = single_step
        self.last_step: StepRecord | None = None

        # Who is here: all in order of arrival, those with blocks in order of admission.
        self._live: dict[int, Attempt] = {}
        self._queue = WaitingQueue(spec.scheduling == "priority")
        self._running: dict[Attempt, None] = {}
        self._batch = DecodeBatch(spec.block_size)
        self._prefilling: Attempt | None = None  # its prefill goes on in the next step
        self._kv = KvBlocks(spec.kv_blocks, spec.prefix_caching)
        self._watermark = int(spec.watermark * (spec.kv_blocks + 1))
        self._blocked = False  # the first in line waits for blocks to be freed
        self._gate = _RUN_ALL
        self._pauses: list[tuple[PauseMode, bool]] = []  # not yet complete
        self._arrivals = 0
        self._admissions = 0

        # The last boundary (step end) and, within a step that needed deciding, its end.
        self._step = 0
        self._at = -math.inf
        self._end: float | None = None
        self._making = 0  # tokens that the step under way will bring
        self._idled: list[Attempt] = []  # running, but left out of it

        # Inputs on their way to the next boundary; aborts also go a shorter one (see _conclude).
        self._now = -math.inf
        self._inbox: deque[tuple[float, Callable[[Saying, Any], None], Any]] = deque()
        self._aborts: deque[tuple[float, int]] = deque()
        self._foreseen: float | None = None
        self._plan: _Jump | None = None  # see _plan_jump

        self._generated = 0
        self._busy_s = 0.0
        self.preemptions = 0
        self.prefill_tokens = 0
        """context tokens computed, re-prefill included"""
        self.cached_tokens = 0
        """context tokens found in the prefix cache instead"""
        self.reprefilled_tokens = 0
        """those of prefill_tokens that had been computed before: preempted or resumed"""

    # Inputs

    def submit(self, request: SimRequest, now: float) -> None:
        """Send an attempt.

        Raises ValueError if it could never run (naming the limit), if its number is in use, or
        if its stream already has an attempt here.
        """
        goal, reason = _goal(request, self.spec)
        if request.attempt in self._live:
            raise ValueError(f"attempt {request.attempt} is already on this instance")
        self._clock(now)
        self._plan = None
        blocks = request.shared_tokens // self.spec.block_size
        shared = self._kv.chain((request.salt, request.prompt_stream))
        own = self._kv.chain((request.salt, request.prompt_stream, blocks, request.stream))
        if own.owner is not None:
            raise ValueError(
                f"attempt {request.attempt}: stream {request.stream!r} already has attempt "
                f"{own.owner} here; abort that one or give the copy its own stream"
            )
        own.owner = request.attempt
        self._arrivals += 1
        attempt = Attempt(request, goal, reason, self._arrivals, shared, own, blocks)
        self._live[request.attempt] = attempt
        self._inbox.append((now, self._on_submit, attempt))

    def abort(self, attempt: int, now: float) -> None:
        """End an attempt with the tokens it has. Unknown and ended ones are ignored.

        As in vLLM, the token of a step that is under way is lost.
        """
        self._post(now, self._on_abort, attempt)
        self._aborts.append((now, attempt))
        live = self._live.get(attempt)
        if live is not None and live.own.owner == attempt:
            live.own.owner = None

    def pause(self, now: float, mode: PauseMode, clear_cache: bool) -> None:
        """Stop after the current step; `Paused` follows when that is done.

        keep   everything stays where it is; with clear_cache all running ones are preempted
        abort  everything ends with what it has
        wait   running ones are finished, queued ones stay queued

        What is submitted while paused is queued. A second pause replaces the mode of the first.
        """
        if mode not in ("keep", "abort", "wait"):
            raise ValueError(f"pause mode must be keep, abort or wait, got {mode!r}")
        self._post(now, self._on_pause, (mode, clear_cache))

    def resume(self, now: float) -> None:
        """Go on. Without a pause this changes nothing."""
        self._post(now, self._on_resume)

    def set_version(self, version: int, now: float) -> None:
        """The weights have changed: tokens of later steps carry this version. KV stays."""
        self._post(now, self._on_set_version, version)

    def clear_cache(self, now: float, preempt: bool = False) -> None:
        """vLLM's reset_prefix_cache: forget cached blocks, which it silently leaves undone while
        any block is held. With preempt=True all running attempts are preempted first."""
        self._post(now, self._on_clear_cache, preempt)

    def close(self) -> None:
        """The end of this instance, so that its memory need not wait for the garbage collector."""
        self._kv.close()

    # Time

    def next_at(self) -> float:
        """When to call `advance` next, in seconds: the time of the next thing to say, or of a
        decision on which it depends. Infinite if nothing will happen without a new input.
        Never before the last call or input: what is overdue is due now."""
        if self._foreseen is None:
            at, now = self._foresee(), self._now
            self._foreseen = at if at > now else now
        return self._foreseen

    def advance(self, now: float) -> list[Ended | Paused]:
        """Everything that has happened up to and including now, in order.

        Raises ValueError if now lies before an earlier call or input.
        """
        self._clock(now)
        said: Saying = []
        inbox = self._inbox
        while True:
            if self._end is not None:
                if self._end > now:
                    break
                self._complete_step(said)
            elif inbox and inbox[0][0] <= self._at:
                _, take_effect, argument = inbox.popleft()
                self._plan = None
                take_effect(said, argument)
            elif now <= self._at:
                break
            elif (plan := self._plan_jump(self._step, self._at)) is not None:
                if plan.end > now:
                    break
                self._jump(plan, said)
            elif self._can_run():
                self._begin_step()
            elif inbox and inbox[0][0] <= now:
                self._at = inbox[0][0]
            else:
                break
        return said

    def progress(self, now: float) -> dict[int, int]:
        """New tokens so far of every attempt here, for a time not after next_at."""
        step = self._step + self._steps_by(now)
        return {number: a.tokens_at(step) - a.context for number, a in self._live.items()}

    # Steps, for whoever follows single tokens

    def due_step(self, attempt: int, tokens: int) -> int | None:
        """The step with which an attempt will have made `tokens` new tokens, if nobody intervenes;
        None while it waits or prefills."""
        live = self._live.get(attempt)
        if live is None or live.state != DECODING:
            return None
        return live.context + tokens - live.shift

    def step_at(self, step: int) -> float:
        """When this step ends or ended, in seconds. Infinite if that is not settled yet: ask again
        after the time that next_at tells."""
        last, at = self._step, self._at
        if self._end is not None:
            last, at = last + 1, self._end
        if step <= last:
            return at
        plan = self._plan_jump(last, at)
        if plan is None:
            return math.inf
        if step - last >= plan.steps:
            return plan.end if step - last == plan.steps else math.inf
        batch = self._batch
        return at + self.spec.cost.jump(step - last, batch.count, batch.context(last))

    def spans_by(self, attempt: int, step: int) -> tuple[tuple[int, int], ...]:
        """(version, tokens) of what a decoding attempt has made with this step, one not before the
        last change of the version."""
        live = self._live[attempt]
        made = live.tokens_at(step) - live.span_start
        return (*live.spans, (self.version, made)) if made else live.spans

    # Gauges and counters, as of the last call of advance

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Queued and preempted ones. Work still on its way to the next boundary is not counted;
        nor does vLLM, whose /metrics moreover stand still during a pause."""
        return self._queue.size

    @property
    def paused(self) -> bool:
        return self._gate != _RUN_ALL

    @property
    def kv_blocks_used(self) -> int:
        demand = self._batch.demand(self._step, self._steps_by(self._now))
        return self.spec.kv_blocks - self._kv.free + demand

    @property
    def kv_usage(self) -> float:
        """Fraction of the KV blocks that is in use, 0 to 1."""
        return self.kv_blocks_used / self.spec.kv_blocks

    @property
    def steps(self) -> int:
        """Engine steps completed."""
        return self._step + self._steps_by(self._now)

    @property
    def generated_tokens(self) -> int:
        return self._generated + self._batch.count * self._steps_by(self._now)

    @property
    def busy_s(self) -> float:
        """Seconds spent in steps, so far in the one under way."""
        under_way = self._end is not None or self._can_run()
        return self._busy_s + (max(0.0, self._now - self._at) if under_way else 0.0)

    # Foreseeing

    def _clock(self, now: float) -> None:
        if now < self._now:
            raise ValueError(f"time went back from {self._now} to {now}")
        self._now = now
        self._foreseen = None

    def _post(
        self, now: float, take_effect: Callable[[Saying, Any], None], argument: object = None
    ) -> None:
        self._clock(now)
        self._plan = None
        self._inbox.append((now, take_effect, argument))

    def _can_run(self) -> bool:
        if self._gate == _RUN_ALL:
            return bool(self._running) or self._queue.size > 0
        return self._gate == _RUN_ADMITTED and bool(self._running)

    def _must_decide(self, step: int) -> bool:
        """Whether the step after this boundary can be anything but one more token for all."""
        can_admit = (
            self._queue.size > 0
            and not self._blocked
            and self._gate == _RUN_ALL
            and len(self._running) < self.spec.max_num_seqs
        )
        return (
            can_admit
            or self._prefilling is not None
            or self._batch.needs_at(step) > self._kv.free
            or self.single_step
        )

    def _foresee(self) -> float:
        step, at, inbox = self._step, self._at, self._inbox
        if self._end is not None:
            step, at = step + 1, self._end
            if (
                self._pauses
                or self._idled
                or (self._batch.count and self._batch.next_end() == step)
            ):
                return at
        if inbox and inbox[0][0] <= at:
            return at
        plan = self._plan_jump(step, at)
        if plan is not None:
            return plan.end
        if self._can_run():
            return math.nextafter(at, math.inf)
        return inbox[0][0] if inbox else math.inf

    def _plan_jump(self, step: int, at: float) -> _Jump | None:
        """How many decode steps can be made from this boundary at once, and when they end.

        None if the next step has to be decided, or there is none. The plan is kept until
        something changes: an input, somebody leaving, a step to be decided.
        """
        plan = self._plan
        if plan is not None and plan.step == step and plan.at == at:
            return plan
        if not self._can_run() or self._must_decide(step):
            return None
        batch = self._batch
        steps = batch.steps_that_fit(step, batch.next_end() - step, self._kv.free)
        if self._inbox:
            steps = min(steps, self._steps_to_input(step, at))
        seconds = self.spec.cost.jump(steps, batch.count, batch.context(step))
        self._plan = plan = _Jump(step, at, steps, at + seconds)
        return plan

    def _steps_to_input(self, step: int, at: float) -> int:
        """Steps up to the first boundary at or after the next input. The inverse of the formula
        is only a guess here: what is compared are the very sums that become the boundaries."""
        arrives, cost = self._inbox[0][0], self.spec.cost
        count, context = self._batch.count, self._batch.context(step)
        steps = max(1, cost.steps_within(arrives - at, count, context))
        while at + cost.jump(steps, count, context) < arrives:
            steps += 1
        while steps > 1 and at + cost.jump(steps - 1, count, context) >= arrives:
            steps -= 1
        return steps

    def _steps_by(self, now: float) -> int:
        """Whole decode steps of the jump under way that are over by now."""
        if self._end is not None or now <= self._at:
            return 0
        plan = self._plan_jump(self._step, self._at)
        if plan is None:
            return 0
        if now >= plan.end:
            return plan.steps
        context = self._batch.context(self._step)
        return self.spec.cost.steps_within(now - self._at, self._batch.count, context)

    # Steps

    def _jump(self, plan: _Jump, said: Saying) -> None:
        batch, steps = self._batch, plan.steps
        self._kv.allocate(batch.demand(plan.step, steps))
        self._generated += steps * batch.count
        self._busy_s += plan.end - plan.at
        self._step = plan.step + steps
        self._at = plan.end
        self._conclude(said)

    def _begin_step(self) -> None:
        """Decide one step, as Scheduler.schedule does."""
        step, batch, cost = self._step, self._batch, self.spec.cost
        preempted: list[Attempt] = []
        chunks: list[tuple[Attempt, int]] = []
        self._plan = None
        self._idled = self._extend_running(preempted)
        if self._prefilling is not None and not self._idled:
            self._continue_prefill(self._prefilling, chunks, preempted)

        count, context = batch.count, batch.context(step)
        for attempt in self._idled:
            if attempt.state == DECODING:
                count -= 1
                context -= attempt.tokens_at(step)
        if not preempted and self._gate == _RUN_ALL:
            self._admit(chunks, self.spec.max_num_batched_tokens - count)
        if self.single_step:
            self.last_step = self._record(preempted, chunks)

        self._making = count
        prefill, attention = 0, 0.0
        for attempt, tokens in chunks:
            prefill += tokens
            attention += tokens * (attempt.computed + tokens / 2)
            self._compute(attempt, tokens)
        # If the first in line has preempted itself, the step is empty and no model runs.
        tokens = count + prefill
        seconds = cost.step(count, tokens, context, attention) if tokens else cost.step_s
        self._end = self._at + seconds

    def _extend_running(self, preempted: list[Attempt]) -> list[Attempt]:
        """A block for each decoding attempt that needs one, preempting where there is none.

        Returns those that get no turn: when one must preempt itself, vLLM stops there.
        """
        batch, kv, step = self._batch, self._kv, self._step
        if self.single_step:
            size = self.spec.block_size
            decoding = [a for a in self._running if a.state == DECODING]
            due = [a for a in decoding if (a.tokens_at(step) - 1) % size == 0]
        elif batch.needs_at(step) <= kv.free:
            kv.allocate(batch.needs_at(step))
            return []
        else:
            due = batch.needing(step, self._running)
        for attempt in due:
            if attempt.state != DECODING:
                continue  # preempted in favour of one before it
            order = attempt.order
            if kv.free < 1 and not self._make_room(1, attempt, preempted):
                return [a for a in self._running if a.order > order]
            kv.allocate(1)
        return []

    def _make_room(self, blocks: int, attempt: Attempt, preempted: list[Attempt]) -> bool:
        """Preempt until `blocks` are free. False if the attempt itself had to go."""
        while self._kv.free < blocks:
            if self.spec.scheduling == "priority":
                victim = max(self._running, key=_by_urgency)
            else:
                victim = next(reversed(self._running))
            preempted.append(victim)
            self._preempt(victim, scheduled=victim.order < attempt.order)
            if victim is attempt:
                return False
        return True

    def _continue_prefill(
        self, attempt: Attempt, chunks: list[tuple[Attempt, int]], preempted: list[Attempt]
    ) -> None:
        budget = self.spec.max_num_batched_tokens - self._batch.count
        tokens = min(attempt.tokens - attempt.computed, budget)
        start, end = attempt.computed, attempt.computed + tokens
        blocks = self._blocks(end) - self._blocks(start)
        if self._make_room(blocks, attempt, preempted):
            self._kv.allocate(blocks)
            self._kv.seal(attempt, start // self.spec.block_size, end // self.spec.block_size)
            chunks.append((attempt, tokens))

    def _admit(self, chunks: list[tuple[Attempt, int]], budget: int) -> None:
        """From the queue into the running list. Full blocks of a chunk can be found at once, so
        the first of a group computes its prompt and the others, in the same step, find it."""
        kv, queue, running, size = self._kv, self._queue, self._running, self.spec.block_size
        for _, tokens in chunks:
            budget -= tokens
        while budget > 0 and queue.size and len(running) < self.spec.max_num_seqs:
            attempt = queue.first()
            context = attempt.tokens
            # At least one token must be computed, to have something to sample from.
            hit = kv.lookup(attempt, (context - 1) // size)
            # The whole context must fit, though only one chunk of it is allocated now.
            need = -(-context // size) - hit.blocks + hit.idle
            if running:
                need += self._watermark
            if need > kv.free:
                self._blocked = True
                break
            queue.pop()
            if hit.blocks:
                kv.take(attempt, hit)
            start = hit.blocks * size
            end = min(context, start + budget)
            kv.allocate(-(-end // size) - hit.blocks)
            kv.seal(attempt, hit.blocks, end // size)
            budget -= end - start
            self.cached_tokens += start
            attempt.state = PREFILLING
            attempt.computed = start
            attempt.order = self._admissions
            self._admissions += 1
            running[attempt] = None
            chunks.append((attempt, end - start))

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.spec.block_size)

    def _compute(self, attempt: Attempt, tokens: int) -> None:
        """Account for a prefill chunk of the step that has begun."""
        start, end = attempt.computed, attempt.computed + tokens
        self.prefill_tokens += tokens
        if attempt.known > start:
            self.reprefilled_tokens += min(end, attempt.known) - start
        if end < attempt.tokens:
            attempt.computed = end
            self._prefilling = attempt
            return
        if self._prefilling is attempt:
            self._prefilling = None
        self._making += 1
        self._batch.join(attempt, self._step)

    def _record(self, preempted: list[Attempt], chunks: list[tuple[Attempt, int]]) -> StepRecord:
        decoding = (a for a in self._running if a.state == DECODING and a not in self._idled)
        scheduled = {a.number: 1 for a in decoding}
        scheduled.update((a.number, tokens) for a, tokens in chunks)
        hits = {a.number: a.computed for a, _ in chunks if a is not self._prefilling}
        return StepRecord(scheduled, [a.number for a in preempted], hits)

    def _complete_step(self, said: Saying) -> None:
        assert self._end is not None
        self._busy_s += self._end - self._at
        self._generated += self._making
        self._at = self._end
        self._end = None
        self._step += 1
        for attempt in self._idled:
            if attempt.state == DECODING:
                self._batch.delay(attempt, self._step)
        self._conclude(said)
        self._idled = []

    def _conclude(self, said: Saying) -> None:
        """A step has ended. Aborts that came while it ran go before its results, as in vLLM."""
        if self._aborts:
            self._abort_early(said)
        ending = self._batch.ending(self._step)
        if self.single_step:
            decoding = (a for a in self._running if a.state == DECODING)
            ending = [a for a in decoding if a.tokens_at(self._step) == a.goal]
        for attempt in ending:
            self._finish(attempt, attempt.reason, said)
        if self._pauses:
            self._complete_pauses(said)

    def _abort_early(self, said: Saying) -> None:
        aborts = self._aborts
        while aborts and aborts[0][0] < self._at:
            attempt = self._live.get(aborts.popleft()[1])
            if attempt is not None and attempt.state != ARRIVING:
                got_token = attempt.state == DECODING and attempt not in self._idled
                self._finish(attempt, "abort", said, lost=int(got_token))

    # Leaving

    def _leave_running(self, attempt: Attempt, unwritten: int = 1) -> None:
        """Give up slot and blocks, with `tokens` up to date. The KV of the newest token is not
        written yet, except for what the scheduler has just handed out blocks for."""
        del self._running[attempt]
        self._blocked = False
        self._plan = None
        if attempt.state == DECODING:
            self._batch.leave(attempt, self._step)
            attempt.computed = attempt.tokens - unwritten
        elif self._prefilling is attempt:
            self._prefilling = None
        attempt.order = -1
        size = self.spec.block_size
        self._kv.release(attempt, attempt.computed // size, -(-attempt.computed // size))

    def _preempt(self, attempt: Attempt, scheduled: bool = False) -> None:
        """`scheduled`: the step being decided had already included it. Its block then counts as
        cached although it is never computed, in vLLM and so here."""
        written = attempt.computed
        decoding = attempt.state == DECODING
        self._leave_running(attempt, unwritten=0 if scheduled else 1)
        if decoding:
            written = attempt.tokens - 1
        attempt.known = max(attempt.known, written)
        attempt.close_span(attempt.tokens, self.version)
        self.preemptions += 1
        self._queue.push(attempt, front=True)

    def _finish(self, attempt: Attempt, reason: Reason, said: Saying, lost: int = 0) -> None:
        if attempt.state == WAITING:
            self._queue.discard(attempt)
            self._blocked = False
            self._plan = None
        else:
            self._leave_running(attempt)
            attempt.tokens -= lost
            self._generated -= lost
            attempt.close_span(attempt.tokens, self.version)
            attempt.state = OVER
        del self._live[attempt.number]
        own = attempt.own
        if own.owner == attempt.number:
            own.owner = None
        self._kv.retire(attempt)
        tokens = attempt.tokens - attempt.context
        said.append(Ended(attempt.number, tokens, attempt.spans, reason, self._at))

    # Inputs taking effect at a boundary

    def _on_submit(self, said: Saying, attempt: Attempt) -> None:
        self._queue.push(attempt)
        if self.spec.scheduling == "priority":
            self._blocked = False

    def _on_abort(self, said: Saying, number: int) -> None:
        while self._aborts and self._aborts[0][0] <= self._at:
            self._aborts.popleft()
        attempt = self._live.get(number)
        if attempt is not None and attempt.state != ARRIVING:
            self._finish(attempt, "abort", said)
            self._complete_pauses(said)

    def _on_pause(self, said: Saying, pause: tuple[PauseMode, bool]) -> None:
        mode, clear_cache = pause
        if mode == "abort":
            for attempt in [a for a in self._live.values() if a.state != ARRIVING]:
                self._finish(attempt, "abort", said)
        self._gate = _RUN_NOTHING if mode == "keep" else _RUN_ADMITTED
        if self._can_run():
            self._pauses.append(pause)
        else:
            self._complete_pause(mode, clear_cache, said)
            self._complete_pauses(said)

    def _complete_pauses(self, said: Saying) -> None:
        """Pauses that had to wait are complete as soon as nothing can run, whatever the reason:
        a resume in between does not take them back, in vLLM and so here."""
        if self._pauses and not self._can_run():
            for mode, clear_cache in self._pauses:
                self._complete_pause(mode, clear_cache, said)
            self._pauses.clear()

    def _complete_pause(self, mode: PauseMode, clear_cache: bool, said: Saying) -> None:
        if clear_cache:
            self._forget_cache(preempt=True)
        said.append(Paused(mode, self._at))

    def _on_resume(self, said: Saying, _: None) -> None:
        self._gate = _RUN_ALL
        self._blocked = False

    def _on_set_version(self, said: Saying, version: int) -> None:
        for attempt in self._running:
            attempt.close_span(attempt.tokens_at(self._step), self.version)
        self.version = version

    def _on_clear_cache(self, said: Saying, preempt: bool) -> None:
        self._forget_cache(preempt)

    def _forget_cache(self, preempt: bool) -> None:
        while preempt and self._running:
            self._preempt(next(reversed(self._running)))
        self._kv.clear()

    # For tests

    def eviction_order(self) -> Iterator[tuple[tuple[Hashable, ...], int]]:
        """(chain, block number) of the cached free blocks, next to be evicted first."""
        return self._kv.eviction_order()

    def check_invariants(self) -> None:
        """Raises AssertionError naming the first broken promise. Costs O(all that is here)."""
        self._batch.check_invariants([a for a in self._running if a.state == DECODING])
        assert len(self._running) <= self.spec.max_num_seqs, "more running than slots"
        prefilling = [a for a in self._running if a.state == PREFILLING]
        assert prefilling == [a for a in [self._prefilling] if a], "more than one open prefill"
        waiting = sum(1 for a in self._live.values() if a.state == WAITING)
        assert waiting == self._queue.size, "queued attempts are miscounted"
        written = ((a, self._written(a)) for a in self._running)
        size = self.spec.block_size
        self._kv.check_invariants((a, w // size, self._blocks(w)) for a, w in written)

    def _written(self, attempt: Attempt) -> int:
        """Tokens with a place in its blocks, that of the step under way included."""
        if attempt.state != DECODING:
            return attempt.computed
        ahead = self._end is not None and attempt not in self._idled
        return attempt.tokens_at(self._step) - 1 + ahead


def _goal(request: SimRequest, spec: InstanceSpec) -> tuple[int, Reason]:
    """Tokens at the end of this request and why it ends there, or ValueError if it cannot be."""
    context = request.context_tokens
    if context < 1 or request.new_tokens < 1 or request.max_new_tokens < 1:
        raise ValueError(
            f"attempt {request.attempt}: context_tokens ({context}), new_tokens "
            f"({request.new_tokens}) and max_new_tokens ({request.max_new_tokens}) must be >= 1"
        )
    if not (0 <= request.shared_tokens <= context and 0 <= request.known_tokens <= context):
        raise ValueError(
            f"attempt {request.attempt}: shared_tokens ({request.shared_tokens}) and known_tokens "
            f"({request.known_tokens}) must lie within context_tokens ({context})"
        )
    if context >= spec.max_model_len:
        raise ValueError(
            f"attempt {request.attempt}: context of {context} tokens leaves no room for a new one "
            f"within max_model_len {spec.max_model_len}; raise max_model_len or cut the context"
        )
    new = min(request.new_tokens, request.max_new_tokens, spec.max_model_len - context)
    blocks = -(-(context + new - 1) // spec.block_size)  # the last token's KV is never written
    if blocks > spec.kv_blocks:
        raise ValueError(
            f"attempt {request.attempt}: {context} + {new} tokens need {blocks} blocks of "
            f"{spec.block_size}, but the instance has {spec.kv_blocks}; raise kv_blocks or lower "
            f"max_new_tokens"
        )
    return context + new, "stop" if new == request.new_tokens else "length"


def _by_urgency(attempt: Attempt) -> tuple[int, int]:
    return attempt.priority, attempt.arrival
