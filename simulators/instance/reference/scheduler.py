"""The rules of `instance.scheduler` as in vLLM's `schedule()`: two loops over lists."""

from __future__ import annotations

from typing import NamedTuple

from rollout_sched.simulators.instance.model import InstanceSpec, Reason, SimRequest
from rollout_sched.simulators.instance.reference.blocks import Block, BlockName, BlockPool
from rollout_sched.simulators.instance.scheduler import SimCounters
from rollout_sched.simulators.instance.step_time import StepTime


class ReferenceAttempt:
    """An attempt with every count stored explicitly.

    tokens     context and new ones
    computed   leading tokens whose KV is in `blocks`, or will be after the step in progress
    known      leading tokens that were computed at any time, here or before
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
        self._time = StepTime(spec.cost)
        self.pool = BlockPool(spec.kv_blocks, spec.prefix_caching)
        self.waiting: list[ReferenceAttempt] = []
        self.running: list[ReferenceAttempt] = []
        self.counters = SimCounters()
        self.admits = self.runs = True

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
        return self._time.step(decoding, tokens, context, attention, admitted)

    def _sort(self) -> None:
        if self.spec.scheduling == "priority":
            self.waiting.sort(key=lambda attempt: attempt.urgency)
