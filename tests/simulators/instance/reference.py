"""The simulated instance step by step and block by block: slow, simple, the oracle for the jump.

`ReferenceInstance` has the methods of `SimInstance`. Both share the inputs and outcomes (requests,
outcomes, the inbox) and the cost of one step, but nothing of how steps are decided, counted or
jumped.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import takewhile
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
from rollout_sched.simulators.instance.scheduler import SimCounters
from rollout_sched.simulators.instance.step_time import StepTime

# ------------------------------------------------------------------------------------------
# vLLM's KV block pool, block by block: the oracle for the runs of `kv_blocks`.

BlockName = tuple[Hashable, int]
"""(chain, number): the same name, the same content"""


class Block:
    """One block: its name when it is cached, and how many attempts use it."""

    __slots__ = ("name", "users")

    def __init__(self) -> None:
        self.name: BlockName | None = None
        self.users = 0


class BlockPool:
    """A pool of `count` blocks. Of copies with the same name the oldest is found.

    free  in the order of allocation: blocks without content, then the least recently freed
    """

    def __init__(self, count: int, caching: bool = True) -> None:
        self.count = count
        self.caching = caching
        self.free = [Block() for _ in range(count)]
        self._cached: dict[BlockName, list[Block]] = {}

    def lookup(self, names: Iterable[BlockName]) -> list[Block]:
        """The blocks of the longest cached prefix."""
        return [self._cached[name][0] for name in takewhile(self._cached.__contains__, names)]

    def take(self, blocks: Iterable[Block]) -> None:
        """Use blocks that were found."""
        for block in blocks:
            if not block.users:
                self.free.remove(block)
            block.users += 1

    def allocate(self, count: int) -> list[Block]:
        """Allocate `count` <= len(free) blocks; their cached content is forgotten."""
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            block.users = 1
            if block.name is not None:
                copies = self._cached[block.name]
                copies.remove(block)
                if not copies:
                    del self._cached[block.name]
                block.name = None
        return taken

    def cache(self, block: Block, name: BlockName) -> None:
        """All tokens of the block are scheduled: it can be found from now on."""
        if self.caching and block.name is None:
            block.name = name
            self._cached.setdefault(name, []).append(block)

    def release(self, blocks: Sequence[Block]) -> None:
        """Stop using all blocks of an attempt, its last block first."""
        blank: list[Block] = []
        cached: list[Block] = []
        for block in reversed(blocks):
            block.users -= 1
            if not block.users:
                (blank if block.name is None else cached).append(block)
        self.free = [*blank, *self.free, *cached]

    def clear(self) -> None:
        """Forget all cached content; possible only if no block is in use."""
        if len(self.free) == self.count:
            self._cached.clear()
            for block in self.free:
                block.name = None

    def eviction_order(self) -> Iterator[BlockName]:
        """Names of the cached free blocks, next to be evicted first."""
        return (block.name for block in self.free if block.name is not None)


# ------------------------------------------------------------------------------------------
# The rules of `instance.scheduler` as in vLLM's `schedule()`: two loops over lists.


class ReferenceAttempt:
    """An attempt with every count stored explicitly.

    tokens     context and new ones
    computed   leading tokens whose KV is in `blocks`, or will be after the step in progress
    known      leading tokens that were computed at any time, here or before
    cached     leading tokens that were found in the cache when it was first scheduled
    prefilled  all of its context is computed, so it decodes
    versions   of its new tokens, one for each
    text       names what it writes; only an attempt that was not `aborted` may write it
    """

    def __init__(
        self, request: SimRequest, last_token: int, reason: Reason, arrival: int, block_size: int
    ) -> None:
        self.request = request
        self.last_token = last_token
        self.reason = reason
        self.urgency = (request.priority, arrival)
        self.tokens = request.context_tokens
        self.computed = 0
        self.known = request.known_tokens
        self.cached: int | None = None
        self.prefilled = False
        self.versions: list[int] = []
        self.blocks: list[Block] = []
        shared = request.shared_tokens // block_size
        self._prompt = (shared, (request.salt, request.prompt_stream))
        self.text = (request.salt, request.prompt_stream, shared, request.stream)
        self.aborted = False

    @property
    def number(self) -> int:
        return self.request.attempt

    def block_name(self, number: int) -> BlockName:
        shared, prompt = self._prompt
        return (prompt if number < shared else self.text, number)

    def spans(self, made: int) -> tuple[tuple[int, int], ...]:
        """(version, tokens) of its first `made` new tokens."""
        spans: list[tuple[int, int]] = []
        for version in self.versions[:made]:
            count = spans.pop()[1] if spans and spans[-1][0] == version else 0
            spans.append((version, count + 1))
        return tuple(spans)


class ReferenceStep(NamedTuple):
    """The attempts in a step with their tokens, those preempted for it, and the cached tokens that
    admitted ones found."""

    scheduled: dict[ReferenceAttempt, int]
    preempted: list[ReferenceAttempt]
    hits: dict[ReferenceAttempt, int]


class ReferenceScheduler:
    """Queue and running list of one instance. `admits`, `runs`: False during a pause."""

    def __init__(self, spec: InstanceSpec) -> None:
        self.spec = spec
        self.time = StepTime(spec.cost, spec.speculation)
        self.pool = BlockPool(spec.kv_blocks, spec.prefix_caching)
        self.waiting: list[ReferenceAttempt] = []
        self.running: list[ReferenceAttempt] = []
        self.counters = SimCounters(self.time)
        self.admits = self.runs = True
        self.decoding = 0  # sequences of the last decided step

    def can_run(self) -> bool:
        return self.runs and bool(self.running or (self.admits and self.waiting))

    def enqueue(self, attempt: ReferenceAttempt) -> None:
        self.waiting.append(attempt)
        self._sort()

    def reopen(self, _: None) -> None:
        self.admits = self.runs = True

    def remove(self, attempt: ReferenceAttempt) -> None:
        """The attempt has ended, running or waiting."""
        (self.running if attempt in self.running else self.waiting).remove(attempt)
        self.pool.release(attempt.blocks)

    def preempt(self, attempt: ReferenceAttempt) -> None:
        self.running.remove(attempt)
        self.pool.release(attempt.blocks)
        attempt.blocks = []
        attempt.known = max(attempt.known, attempt.computed)
        attempt.computed = 0
        attempt.prefilled = False
        self.waiting.insert(0, attempt)
        self._sort()
        self.counters.preemptions += 1

    def clear_cache(self, preempt: bool) -> None:
        while preempt and self.running:
            self.preempt(self.running[-1])
        self.pool.clear()

    def decide(self) -> tuple[ReferenceStep, float]:
        """The next step, and its duration in seconds."""
        step = ReferenceStep({}, [], {})
        budget = self._schedule_running(step)
        if not step.preempted and self.admits:
            self._schedule_waiting(step, budget)
        seconds = self._seconds(step)
        self.decoding = sum(attempt.prefilled for attempt in step.scheduled)
        for attempt, tokens in step.scheduled.items():
            if not attempt.prefilled:
                self.counters.prefill_tokens += tokens
                again = min(attempt.known, attempt.computed + tokens) - attempt.computed
                self.counters.reprefilled_tokens += max(0, again)
            attempt.computed += tokens
            attempt.prefilled = attempt.computed == attempt.tokens
        return step, seconds

    def _schedule_running(self, step: ReferenceStep) -> int:
        """Returns the rest of the token budget."""
        budget, place = self.spec.max_num_batched_tokens, 0
        while place < len(self.running) and budget:
            attempt = self.running[place]
            tokens = min(attempt.tokens - attempt.computed, budget)
            while self._missing(attempt, tokens) > len(self.pool.free):
                victim = self.running[-1]
                if self.spec.scheduling == "priority":
                    victim = max(self.running, key=lambda one: one.urgency)
                if victim in step.scheduled:
                    budget += step.scheduled.pop(victim)
                    place -= 1
                self.preempt(victim)
                step.preempted.append(victim)
                if victim is attempt:
                    return budget
            self._schedule(step, attempt, tokens)
            budget -= tokens
            place += 1
        return budget

    def _schedule_waiting(self, step: ReferenceStep, budget: int) -> None:
        spec, pool = self.spec, self.pool
        while budget and self.waiting and len(self.running) < spec.max_num_seqs:
            attempt = self.waiting[0]
            findable = (attempt.tokens - 1) // spec.block_size  # one token is always computed
            found = pool.lookup(map(attempt.block_name, range(findable)))
            idle = sum(1 for block in found if not block.users)
            needed = -(-attempt.tokens // spec.block_size) - len(found) + idle
            if self.running:
                needed += spec.watermark_blocks
            if needed > len(pool.free):
                return
            pool.take(found)
            attempt.blocks = found
            attempt.computed = step.hits[attempt] = len(found) * spec.block_size
            self.counters.cached_tokens += attempt.computed
            if attempt.cached is None:
                attempt.cached = attempt.computed
            self.running.append(self.waiting.pop(0))
            tokens = min(attempt.tokens - attempt.computed, budget)
            self._schedule(step, attempt, tokens)
            budget -= tokens

    def _schedule(self, step: ReferenceStep, attempt: ReferenceAttempt, tokens: int) -> None:
        attempt.blocks += self.pool.allocate(self._missing(attempt, tokens))
        size = self.spec.block_size
        for number in range(attempt.computed // size, (attempt.computed + tokens) // size):
            self.pool.cache(attempt.blocks[number], attempt.block_name(number))
        step.scheduled[attempt] = tokens

    def _missing(self, attempt: ReferenceAttempt, tokens: int) -> int:
        """Blocks needed for so many more tokens."""
        return -(-(attempt.computed + tokens) // self.spec.block_size) - len(attempt.blocks)

    def _seconds(self, step: ReferenceStep) -> float:
        decoding, context, attention = 0, 0, 0.0
        for attempt, tokens in step.scheduled.items():
            if attempt.prefilled:
                decoding += 1
                context += attempt.tokens
            else:
                attention += tokens * (attempt.computed + tokens / 2)
        tokens, admitted = sum(step.scheduled.values()), len(step.hits)
        return self.time.step(decoding, tokens, context, attention, admitted)

    def _sort(self) -> None:
        if self.spec.scheduling == "priority":
            self.waiting.sort(key=lambda attempt: attempt.urgency)


# ------------------------------------------------------------------------------------------
# `SimInstance` without the jump: every step is decided, every token counted.

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
        self.scheduler.time.set_version(version)
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
        self.scheduler.time.set_version(version)

    def complete(self, step: ReferenceStep, end: float) -> None:
        """The results of a step, after the aborts that came while it ran."""
        self.at = end
        self.steps += 1
        decoding = self.scheduler.decoding
        self.scheduler.counters.drafted.add(decoding, decoding)
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
        cached = (attempt.cached or 0) if made else 0
        spans = attempt.spans(made)
        self.outcomes.append(Ended(attempt.number, made, spans, reason, self.at, cached))

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

    def slow(self, factor: float, now: float) -> None:
        self._inbox.clock(now)
        self._inbox.post(self._core.scheduler.time.slow, factor)

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
            *counters.drafted.totals(0, 0),
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
