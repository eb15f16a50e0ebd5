"""The decisions of vLLM's scheduler for one step. It counts steps and has no notion of time.

Reproduced from vLLM 0.32 (v1/core/sched/scheduler.py) with synchronous scheduling, one kind of
full attention. Steps that verify drafts go on by one token too (see `step_time`):

1. Running attempts come first, in the order of their admission: one token each, or the next chunk
   of a prefill, within the token budget. An attempt that finds no KV block preempts the last
   running one (fcfs) or the worst by (priority, arrival). The victim loses its blocks, returns to
   the head of the queue and is computed again (or found in the prefix cache) later.
2. If nobody was preempted, queued attempts are admitted while there are slots, budget and, for the
   first in the queue, free blocks for its whole context. If the first is blocked, the others wait.
3. The results of the step are known at its end: a token for each attempt with a complete context.

No work is done per token, nor per running attempt while there are enough blocks for all of them.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Final

from rollout_sched.simulators.instance.kv_blocks import Chain, KvBlocks, Table
from rollout_sched.simulators.instance.model import InstanceSpec, Reason, SimRequest
from rollout_sched.simulators.instance.step_time import DraftedTokens, StepTime

# ------------------------------------------------------------------------------------------
# The attempts on a simulated instance, and its queue of waiting ones.

# Final, so that compiled code does not look them up.
ARRIVING: Final = 0
WAITING: Final = 1
PREFILLING: Final = 2
DECODING: Final = 3
OVER: Final = 4


class SimAttempt(Table):
    """State of one attempt on an instance, and the KV blocks it uses.

    `tokens` (context and new ones) is not updated while it decodes; it is then shift + step, with
    `step` the number of steps that the instance has made.
    """

    __slots__ = (
        "arrival",
        "cached",
        "computed",
        "context",
        "goal",
        "known",
        "number",
        "order",
        "priority",
        "reason",
        "shift",
        "span_start",
        "spans",
        "state",
        "tokens",
    )

    def __init__(
        self,
        request: SimRequest,
        goal: int,
        reason: Reason,
        arrival: int,
        shared: Chain,
        own: Chain,
        blocks: int,
    ) -> None:
        super().__init__(shared, own, blocks)
        self.number = request.attempt
        self.priority = request.priority
        self.known = request.known_tokens
        self.context = self.tokens = self.span_start = request.context_tokens
        self.goal = goal  # its final tokens, and the reason why it ends there
        self.reason = reason
        self.arrival = arrival
        self.state = ARRIVING
        self.cached = -1  # tokens found in the prefix cache when it was first admitted
        self.computed = 0  # while it prefills
        self.shift = 0  # while it decodes
        self.order = -1  # place in the running list, -1 outside
        self.spans: tuple[tuple[int, int], ...] = ()

    def tokens_at(self, step: int) -> int:
        return self.shift + step if self.state == DECODING else self.tokens

    def close_span(self, tokens: int, version: int) -> None:
        """The present version made all tokens up to `tokens` that have no version yet."""
        made = tokens - self.span_start
        if not made:
            return
        self.span_start = tokens
        spans = self.spans
        if spans and spans[-1][0] == version:
            self.spans = (*spans[:-1], (version, spans[-1][1] + made))
        else:
            self.spans = (*spans, (version, made))


class SimWaitingQueue:
    """First come first served with preempted attempts in front, or by (priority, arrival)."""

    __slots__ = ("_deque", "_heap", "_priority", "size")

    def __init__(self, priority: bool) -> None:
        self._priority = priority
        self._deque: deque[SimAttempt] = deque()
        self._heap: list[tuple[int, int, SimAttempt]] = []
        self.size = 0

    def push(self, attempt: SimAttempt, front: bool = False) -> None:
        attempt.state = WAITING
        self.size += 1
        if self._priority:
            heappush(self._heap, (attempt.priority, attempt.arrival, attempt))
        elif front:
            self._deque.appendleft(attempt)
        else:
            self._deque.append(attempt)

    def first(self) -> SimAttempt:
        """The next in line; the queue must not be empty."""
        if self._priority:
            heap = self._heap
            while heap[0][2].state != WAITING:
                heappop(heap)
            return heap[0][2]
        queue = self._deque
        while queue[0].state != WAITING:
            queue.popleft()
        return queue[0]

    def pop(self) -> None:
        """Remove what first() has returned."""
        self.size -= 1
        if self._priority:
            heappop(self._heap)
        else:
            self._deque.popleft()

    def discard(self, attempt: SimAttempt) -> None:
        """The attempt has ended while waiting. It is skipped at the head of the queue, so this is
        free."""
        attempt.state = OVER
        self.size -= 1


class SimCounters:
    """Counters of a simulated instance since it started. All except the first two are in tokens.

    prefill_tokens      context tokens that were computed, including re-prefill
    cached_tokens       context tokens that were found in the prefix cache instead
    reprefilled_tokens  those of prefill_tokens that had been computed before: preempted or resumed
    """

    __slots__ = (
        "admissions",
        "cached_tokens",
        "drafted",
        "generated_tokens",
        "preemptions",
        "prefill_tokens",
        "reprefilled_tokens",
    )

    def __init__(self, time: StepTime) -> None:
        self.admissions = 0
        self.preemptions = 0
        self.prefill_tokens = 0
        self.cached_tokens = 0
        self.reprefilled_tokens = 0
        self.generated_tokens = 0
        self.drafted = DraftedTokens(time)


# ------------------------------------------------------------------------------------------
# The decoding attempts of an instance, and the arithmetic of the event jump.
#
# While nobody joins or leaves, every attempt gains one token per step. With shift = tokens - step,
# a constant, everything needed follows without a look at each attempt:
#
# * the sum of their contexts is (sum of shifts) + (how many) * step,
# * an attempt ends with step goal - shift, so a list sorted by that step finds the next end,
# * it needs a new block in the step after boundary b if the tokens computed so far, shift + b - 1,
#   fill whole blocks: if b = 1 - shift modulo the block size. So counting the attempts by that
#   residue gives the blocks that any number of steps takes.


class DecodeBatch:
    """All attempts that gain a token per step. `step` is always the number of steps made."""

    __slots__ = ("_ends", "_needs", "_shifts", "_size", "count")

    def __init__(self, block_size: int) -> None:
        self.count = 0
        self._size = block_size
        self._shifts = 0
        self._needs = [0] * block_size
        # (-end, -order, attempt), the next to end last, so that removing it is cheap.
        self._ends: list[tuple[int, int, SimAttempt]] = []

    def join(self, attempt: SimAttempt, step: int) -> None:
        """The attempt gains its first token in the step after boundary `step`."""
        attempt.state = DECODING
        attempt.shift = shift = attempt.tokens - step
        self.count += 1
        self._shifts += shift
        self._needs[(1 - shift) % self._size] += 1
        insort(self._ends, (shift - attempt.goal, -attempt.order, attempt))

    def leave(self, attempt: SimAttempt, step: int) -> None:
        shift = attempt.shift
        attempt.tokens = shift + step
        self.count -= 1
        self._shifts -= shift
        self._needs[(1 - shift) % self._size] -= 1

    def delay(self, attempt: SimAttempt, step: int) -> None:
        """The attempt was left out of the step that ended with boundary `step`, so everything
        happens one step later for it."""
        self.leave(attempt, step - 1)
        self.join(attempt, step)

    def context(self, step: int) -> int:
        """Sum of the contexts that the step after this boundary reads."""
        return self._shifts + self.count * step

    def next_end(self) -> int:
        """The step in which the next attempt ends; there must be one."""
        ends = self._ends
        while True:
            end, order, attempt = ends[-1]
            if attempt.order == -order and attempt.shift - attempt.goal == end:
                return -end
            ends.pop()  # it has left or was delayed

    def ending(self, step: int) -> list[SimAttempt]:
        """The attempts that end in this step, in running order. The caller removes them."""
        ends, found = self._ends, []
        while ends and ends[-1][0] >= -step:
            end, order, attempt = ends.pop()
            if attempt.order == -order and attempt.shift - attempt.goal == end:
                found.append(attempt)
        return found

    def needs_at(self, step: int) -> int:
        """Blocks that the step after this boundary takes."""
        return self._needs[step % self._size]

    def needing(self, step: int, running: Iterable[SimAttempt]) -> list[SimAttempt]:
        """The running attempts that take blocks in this step. Used only if there are too few."""
        size = self._size
        decoding = (a for a in running if a.state == DECODING)
        return [a for a in decoding if (a.shift + step - 1) % size == 0]

    def demand(self, step: int, steps: int) -> int:
        """Blocks that the next `steps` steps take."""
        size, needs, start = self._size, self._needs, step % self._size
        blocks = steps // size * self.count
        for offset in range(start, start + steps % size):
            blocks += needs[offset % size]
        return blocks

    def steps_that_fit(self, step: int, steps: int, free: int) -> int:
        """The largest m <= steps such that m steps need at most `free` blocks."""
        size, count = self._size, self.count
        if (steps // size + 1) * count <= free:
            return steps  # the common case, without using the residues
        cycles, free = divmod(free, count)
        for offset in range(size):
            free -= self._needs[(step + offset) % size]
            if free < 0:
                return min(steps, cycles * size + offset)
        raise AssertionError("a full cycle needs as many blocks as there are attempts")

    def check_invariants(self, attempts: list[SimAttempt]) -> None:
        """Compare with the attempts that it should have. Raises AssertionError."""
        assert self.count == len(attempts), "decoding attempts are miscounted"
        assert self._shifts == sum(a.shift for a in attempts), "contexts are summed up wrongly"
        for residue, count in enumerate(self._needs):
            members = [a for a in attempts if (1 - a.shift) % self._size == residue]
            assert count == len(members), f"residue class {residue} is miscounted"
        ends = {(end, a) for end, order, a in self._ends if a.order == -order}
        missing = {(a.shift - a.goal, a) for a in attempts} - ends
        assert not missing, "an end is missing"


RUN_ALL: Final = 0
RUN_ADMITTED: Final = 1
RUN_NOTHING: Final = 2

Chunks = list[tuple[SimAttempt, int]]


class DecidedStep:
    """One step that needed a decision.

    seconds     its duration
    sequences   those that decode in it
    new_tokens  the tokens that it makes
    idled       running attempts that are left out of it
    """

    __slots__ = ("idled", "new_tokens", "seconds", "sequences")

    def __init__(
        self, seconds: float, sequences: int, new_tokens: int, idled: list[SimAttempt]
    ) -> None:
        self.seconds = seconds
        self.sequences = sequences
        self.new_tokens = new_tokens
        self.idled = idled


class StepScheduler:
    """Queue, running list and KV blocks of one instance, and the attempts in its next step.

    running     all attempts with blocks, in order of admission; those in `batch` decode
    prefilling  the one whose prefill continues in the next step
    blocked     the first in the queue waits for free blocks
    gate        RUN_ALL, RUN_ADMITTED (no new ones) or RUN_NOTHING
    step        number of steps made
    time        duration of a step
    """

    __slots__ = (
        "batch",
        "blocked",
        "counters",
        "gate",
        "kv",
        "prefilling",
        "queue",
        "running",
        "spec",
        "step",
        "time",
    )

    def __init__(self, spec: InstanceSpec) -> None:
        self.spec = spec
        self.time = StepTime(spec.cost, spec.speculation)
        self.counters = SimCounters(self.time)
        self.kv = KvBlocks(spec.kv_blocks, spec.prefix_caching)
        self.queue = SimWaitingQueue(spec.scheduling == "priority")
        self.running: dict[SimAttempt, None] = {}
        self.batch = DecodeBatch(spec.block_size)
        self.prefilling: SimAttempt | None = None
        self.blocked = False
        self.gate = RUN_ALL
        self.step = 0

    # -- coming and going ------------------------------------------------------------------

    def add(self, attempt: SimAttempt) -> None:
        """Append to the queue."""
        self.queue.push(attempt)
        if self.spec.scheduling == "priority":
            self.blocked = False

    def remove(self, attempt: SimAttempt, lost: int = 0) -> None:
        """The attempt has ended, running or waiting; `lost` of its newest tokens do not count."""
        if attempt.state == WAITING:
            self.queue.discard(attempt)
            self.blocked = False
        else:
            self._leave_running(attempt)
            attempt.tokens -= lost
            self.counters.generated_tokens -= lost
            attempt.state = OVER
        self.kv.retire(attempt)

    def preempt(self, attempt: SimAttempt, scheduled: bool = False) -> None:
        """`scheduled`: the step being decided already included it. As in vLLM, its block then
        counts as cached although it is never computed."""
        written = attempt.computed
        decoding = attempt.state == DECODING
        self._leave_running(attempt, unwritten=0 if scheduled else 1)
        if decoding:
            written = attempt.tokens - 1
        attempt.known = max(attempt.known, written)
        self.counters.preemptions += 1
        self.queue.push(attempt, front=True)

    def clear_cache(self, preempt: bool) -> None:
        """Forget cached blocks, possible only if none is in use; with `preempt` all running
        attempts are preempted first."""
        while preempt and self.running:
            self.preempt(next(reversed(self.running)))
        self.kv.clear()

    def reopen(self) -> None:
        self.gate = RUN_ALL
        self.blocked = False

    def _leave_running(self, attempt: SimAttempt, unwritten: int = 1) -> None:
        """Release slot and blocks, with `tokens` up to date. The KV of the newest token is not
        written yet, except if the scheduler has just allocated blocks for it."""
        del self.running[attempt]
        self.blocked = False
        if attempt.state == DECODING:
            self.batch.leave(attempt, self.step)
            attempt.computed = attempt.tokens - unwritten
        elif self.prefilling is attempt:
            self.prefilling = None
        attempt.order = -1
        size = self.spec.block_size
        self.kv.release(attempt, attempt.computed // size, -(-attempt.computed // size))

    # -- what is to be decided -------------------------------------------------------------

    def can_run(self) -> bool:
        if self.gate == RUN_ALL:
            return bool(self.running) or self.queue.size > 0
        return self.gate == RUN_ADMITTED and bool(self.running)

    def must_decide(self, step: int) -> bool:
        """Whether the step after this boundary may differ from one more token for all."""
        can_admit = (
            self.queue.size > 0
            and not self.blocked
            and self.gate == RUN_ALL
            and len(self.running) < self.spec.max_num_seqs
        )
        return can_admit or self.prefilling is not None or self.batch.needs_at(step) > self.kv.free

    def jump(self, steps: int) -> None:
        """`steps` steps without a decision are over."""
        batch = self.batch
        self.kv.allocate(batch.demand(self.step, steps))
        self.counters.generated_tokens += steps * batch.count
        self.counters.drafted.add(batch.count, steps * batch.count)
        self.step += steps

    def decide(self) -> DecidedStep:
        """The attempts in the next step, as Scheduler.schedule chooses them."""
        step, batch = self.step, self.batch
        preempted: list[SimAttempt] = []
        chunks: Chunks = []
        idled = self._extend_running(preempted)
        if self.prefilling is not None and not idled:
            self._continue_prefill(self.prefilling, chunks, preempted)

        count, context = batch.count, batch.context(step)
        for attempt in idled:
            if attempt.state == DECODING:
                count -= 1
                context -= attempt.tokens_at(step)
        before = self.counters.admissions
        if not preempted and self.gate == RUN_ALL:
            self._admit(chunks, self.spec.max_num_batched_tokens - count)

        new_tokens, prefill, attention = count, 0, 0.0
        for attempt, tokens in chunks:
            prefill += tokens
            attention += tokens * (attempt.computed + tokens / 2)
            new_tokens += self._compute(attempt, tokens)
        # If the first in the queue has preempted itself, the step is empty.
        admitted = self.counters.admissions - before
        seconds = self.time.step(count, count + prefill, context, attention, admitted)
        return DecidedStep(seconds, count, new_tokens, idled)

    def complete(self, step: DecidedStep) -> None:
        """The decided step is over."""
        self.counters.generated_tokens += step.new_tokens
        self.counters.drafted.add(step.sequences, step.sequences)
        self.step += 1
        for attempt in step.idled:
            if attempt.state == DECODING:
                self.batch.delay(attempt, self.step)

    # -- deciding --------------------------------------------------------------------------

    def _extend_running(self, preempted: list[SimAttempt]) -> list[SimAttempt]:
        """Allocate a block for each decoding attempt that needs one; preempt if there is none.

        Returns the attempts left out of the step: vLLM stops when one must preempt itself.
        """
        batch, kv, step = self.batch, self.kv, self.step
        if batch.needs_at(step) <= kv.free:
            kv.allocate(batch.needs_at(step))
            return []
        for attempt in batch.needing(step, self.running):
            if attempt.state != DECODING:
                continue  # preempted for an earlier one
            order = attempt.order
            if kv.free < 1 and not self._free_blocks(1, attempt, preempted):
                return [a for a in self.running if a.order > order]
            kv.allocate(1)
        return []

    def _free_blocks(self, blocks: int, attempt: SimAttempt, preempted: list[SimAttempt]) -> bool:
        """Preempt until `blocks` are free. False if the attempt itself was preempted."""
        while self.kv.free < blocks:
            if self.spec.scheduling == "priority":
                victim = max(self.running, key=_by_urgency)
            else:
                victim = next(reversed(self.running))
            preempted.append(victim)
            self.preempt(victim, scheduled=victim.order < attempt.order)
            if victim is attempt:
                return False
        return True

    def _continue_prefill(
        self, attempt: SimAttempt, chunks: Chunks, preempted: list[SimAttempt]
    ) -> None:
        budget, size = self.spec.max_num_batched_tokens - self.batch.count, self.spec.block_size
        tokens = min(attempt.tokens - attempt.computed, budget)
        start, end = attempt.computed, attempt.computed + tokens
        blocks = -(-end // size) - -(-start // size)
        if self._free_blocks(blocks, attempt, preempted):
            self.kv.allocate(blocks)
            self.kv.seal(attempt, start // size, end // size)
            chunks.append((attempt, tokens))

    def _admit(self, chunks: Chunks, budget: int) -> None:
        """Admit from the queue into the running list. Full blocks of a chain can be found at once,
        so the first of a group computes its prompt and the others find it in the same step."""
        kv, queue, running, spec = self.kv, self.queue, self.running, self.spec
        size, counters = spec.block_size, self.counters
        for _, tokens in chunks:
            budget -= tokens
        while budget > 0 and queue.size and len(running) < spec.max_num_seqs:
            attempt = queue.first()
            context = attempt.tokens
            # At least one token must be computed, because sampling needs its logits.
            hit = kv.lookup(attempt, (context - 1) // size)
            # The whole context must fit, although only one chunk of it is allocated now.
            need = -(-context // size) - hit.blocks + hit.idle
            if running and spec.watermark:
                need += spec.watermark_blocks
            if need > kv.free:
                self.blocked = True
                break
            queue.pop()
            if hit.blocks:
                kv.take(attempt, hit)
            start = hit.blocks * size
            end = min(context, start + budget)
            kv.allocate(-(-end // size) - hit.blocks)
            kv.seal(attempt, hit.blocks, end // size)
            budget -= end - start
            counters.cached_tokens += start
            if attempt.cached < 0:
                attempt.cached = start
            attempt.state = PREFILLING
            attempt.computed = start
            attempt.order = counters.admissions
            counters.admissions += 1
            running[attempt] = None
            chunks.append((attempt, end - start))

    def _compute(self, attempt: SimAttempt, tokens: int) -> int:
        """Account for a prefill chunk of the step that begins; returns the new tokens it makes."""
        start, end = attempt.computed, attempt.computed + tokens
        self.counters.prefill_tokens += tokens
        if attempt.known > start:
            self.counters.reprefilled_tokens += min(end, attempt.known) - start
        if end < attempt.tokens:
            attempt.computed = end
            self.prefilling = attempt
            return 0
        if self.prefilling is attempt:
            self.prefilling = None
        self.batch.join(attempt, self.step)
        return 1

    # -- for tests -------------------------------------------------------------------------

    def check_invariants(self, under_way: DecidedStep | None) -> None:
        """Raises AssertionError with the first violated invariant. Costs O(running attempts)."""
        self.batch.check_invariants([a for a in self.running if a.state == DECODING])
        assert len(self.running) <= self.spec.max_num_seqs, "more running than slots"
        prefilling = [a for a in self.running if a.state == PREFILLING]
        assert prefilling == [a for a in [self.prefilling] if a], "more than one open prefill"
        size = self.spec.block_size
        written = ((a, self._written(a, under_way)) for a in self.running)
        self.kv.check_invariants((a, w // size, -(-w // size)) for a, w in written)

    def _written(self, attempt: SimAttempt, under_way: DecidedStep | None) -> int:
        """Tokens with a place in its blocks, including that of the step in progress."""
        if attempt.state != DECODING:
            return attempt.computed
        ahead = under_way is not None and attempt not in under_way.idled
        return attempt.tokens_at(self.step) - 1 + ahead


def _by_urgency(attempt: SimAttempt) -> tuple[int, int]:
    return attempt.priority, attempt.arrival
