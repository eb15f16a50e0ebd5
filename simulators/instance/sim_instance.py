"""A vLLM instance in virtual time: the decisions of its scheduler and their times, without tokens.

`scheduler` has the rules of a step, `engine` the boundary between two steps, this file the number
of steps made at once. `tests/simulators/instance/reference.py` is the same instance step by step,
the oracle for the jump.

Time: an input at or before the end of a step counts for the next step, which is decided immediately
*after* that instant. So the result does not depend on how often, or in which order, the methods are
called within an instant.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Final

from rollout_sched.simulators.instance.engine import EngineCore, Inbox, check_pause_mode, last_token
from rollout_sched.simulators.instance.model import (
    InstanceSpec,
    Outcome,
    PauseMode,
    SimGauges,
    SimRequest,
)
from rollout_sched.simulators.instance.scheduler import (
    DECODING,
    RUN_ALL,
    DecidedStep,
    StepScheduler,
)

# ------------------------------------------------------------------------------------------
# The event jump: between two events the batch does not change, so any number of decode steps is
# one closed formula (see decode_batch). No work is done per token or per running attempt.

INFINITY: Final = float("inf")
NO_STEP: Final = -1


class EventJump:
    """How many decode steps can be made at once from a boundary, and when they end.

    steps, end  as last planned

    The plan is kept until something changes: an input, an attempt that leaves, a step that needs a
    decision. Code that changes something calls `forget`.
    """

    __slots__ = ("_at", "_inbox", "_scheduler", "_step", "end", "steps")

    def __init__(self, scheduler: StepScheduler, inbox: Inbox) -> None:
        self.steps = 0
        self.end = 0.0
        self._scheduler = scheduler
        self._inbox = inbox
        self._step = NO_STEP  # the boundary of the plan ...
        self._at = 0.0  # ... and its time

    def forget(self) -> None:
        self._step = NO_STEP

    def plan(self, step: int, at: float) -> bool:
        """Plan from the boundary `step` at time `at`: the last one, or the end of the step in
        progress. False if the next step needs a decision, or there is none."""
        if step == self._step and at == self._at:
            return True
        scheduler = self._scheduler
        if not scheduler.can_run() or scheduler.must_decide(step):
            return False
        batch = scheduler.batch
        steps = batch.steps_that_fit(step, batch.next_end() - step, scheduler.kv.free)
        if self._inbox.due < INFINITY:
            steps = min(steps, self._steps_to_input(step, at))
        self.steps = steps
        self.end = at + scheduler.time.jump(steps, batch.count, batch.context(step))
        self._step, self._at = step, at
        return True

    def _steps_to_input(self, step: int, at: float) -> int:
        """Steps up to the first boundary at or after the next input. The inverse of the formula is
        only a guess; the comparison uses the same sums that become the boundaries."""
        arrives, time, batch = self._inbox.due, self._scheduler.time, self._scheduler.batch
        count, context = batch.count, batch.context(step)
        steps = max(1, time.steps_within(arrives - at, count, context))
        while at + time.jump(steps, count, context) < arrives:
            steps += 1
        while steps > 1 and at + time.jump(steps - 1, count, context) >= arrives:
            steps -= 1
        return steps

    def steps_by(self, step: int, at: float, now: float) -> int:
        """Whole decode steps of the jump from this boundary that are finished by now."""
        if now <= at:
            return 0
        if not self.plan(step, at):
            return 0
        if now >= self.end:
            return self.steps
        batch = self._scheduler.batch
        return self._scheduler.time.steps_within(now - at, batch.count, batch.context(step))

    def end_of(self, wanted: int, step: int, at: float) -> float:
        """When the step `wanted` ends, if it is part of the jump from this boundary; else inf."""
        if not self.plan(step, at) or wanted - step > self.steps:
            return INFINITY
        if wanted - step == self.steps:
            return self.end
        batch = self._scheduler.batch
        return at + self._scheduler.time.jump(wanted - step, batch.count, batch.context(step))


class SimInstance:
    """One simulated vLLM instance.

    Inputs (submit, abort, pause, ...) may come at any time not before the last one. They take
    effect at the first step end at or after their time, or at once if the instance is idle.
    `next_at` says when to call `advance`, which returns the outcomes.
    """

    __slots__ = ("_core", "_end", "_foreseen", "_inbox", "_jump", "_step", "spec")

    def __init__(self, spec: InstanceSpec, version: int = 0) -> None:
        self.spec = spec
        self._inbox = Inbox()
        self._core = EngineCore(spec, version, self._inbox)
        self._jump = EventJump(self._core.scheduler, self._inbox)
        self._step: DecidedStep | None = None  # in progress, if it needed a decision ...
        self._end = 0.0  # ... and its end
        self._foreseen: float | None = None

    # -- inputs ----------------------------------------------------------------------------

    def submit(self, request: SimRequest, now: float) -> None:
        """Send an attempt.

        Raises ValueError if it could never run (naming the limit), if its number is in use, or if
        its stream already has an attempt on the instance.
        """
        end, reason = last_token(request, self.spec)
        if request.attempt in self._core.requests:
            raise ValueError(f"attempt {request.attempt} is already on this instance")
        self._change(now)
        attempt = self._core.accept(request, end, reason)
        self._inbox.post(self._core.enqueue, attempt)

    def abort(self, attempt: int, now: float) -> None:
        """End an attempt with the tokens it has. Unknown and ended attempts are ignored.

        As in vLLM, the token of a step in progress is lost.
        """
        self._change(now)
        self._inbox.post_abort(self._core.abort, attempt)
        live = self._core.requests.get(attempt)
        if live is not None and live.own.owner == attempt:
            live.own.owner = None

    def pause(self, now: float, mode: PauseMode, clear_cache: bool) -> None:
        """Stop after the current step; `Paused` follows when that is done.

        keep   all attempts stay where they are; with clear_cache all running ones are preempted
        abort  all attempts end with the tokens they have
        wait   running attempts are finished, queued ones stay queued

        Requests submitted during a pause are queued. A second pause replaces the mode of the first.
        """
        check_pause_mode(mode)
        self._change(now)
        self._inbox.post(self._core.pause, (mode, clear_cache))

    def resume(self, now: float) -> None:
        """Resume. Without a pause this changes nothing."""
        self._change(now)
        self._inbox.post(self._core.resume)

    def set_version(self, version: int, now: float) -> None:
        """The weights have changed: tokens of later steps have this version. The KV stays."""
        self._change(now)
        self._inbox.post(self._core.set_version, version)

    def update_drafter(self, now: float) -> None:
        """The drafter has changed, and fits the present weights."""
        self._change(now)
        self._inbox.post(self._core.update_drafter)

    def slow(self, factor: float, now: float) -> None:
        """Later steps take `factor` times as long as the cost model says."""
        self._change(now)
        self._inbox.post(self._core.scheduler.time.slow, factor)

    def clear_cache(self, now: float, preempt: bool = False) -> None:
        """vLLM's reset_prefix_cache: forget cached blocks. As in vLLM it silently does nothing
        while a block is in use. With preempt=True all running attempts are preempted first."""
        self._change(now)
        self._inbox.post(self._core.clear_cache, preempt)

    def close(self) -> None:
        """Break reference cycles, so that memory is freed without the garbage collector."""
        self._core.scheduler.kv.close()

    def _change(self, now: float) -> None:
        self._inbox.clock(now)
        self._foreseen = None
        self._jump.forget()

    # -- time ------------------------------------------------------------------------------

    def next_at(self) -> float:
        """When to call `advance` next, in seconds: the time of the next outcome, or of a decision
        that it depends on. Infinite if nothing happens without a new input. Never before the last
        call or input: what is overdue is due now."""
        if self._foreseen is None:
            at, now = self._foresee(), self._inbox.now
            self._foreseen = at if at > now else now
        return self._foreseen

    def advance(self, now: float) -> list[Outcome]:
        """All outcomes up to and including now, in order.

        Raises ValueError if now is before an earlier call or input.
        """
        core, inbox, jump = self._core, self._inbox, self._jump
        scheduler = core.scheduler
        inbox.clock(now)
        self._foreseen = None
        while True:
            if self._step is not None:
                if self._end > now:
                    break
                self._complete(self._step)
            elif inbox.due <= core.at:
                jump.forget()
                inbox.take()
            elif now <= core.at:
                break
            elif jump.plan(scheduler.step, core.at):
                if jump.end > now:
                    break
                core.jump(jump.steps, jump.end)
            elif scheduler.can_run():
                jump.forget()
                self._step = scheduler.decide()
                self._end = core.at + self._step.seconds
            elif inbox.due <= now:
                core.at = inbox.due
            else:
                break
        outcomes, core.outcomes = core.outcomes, []
        return outcomes

    def _complete(self, step: DecidedStep) -> None:
        core = self._core
        outcomes = len(core.outcomes)
        self._step = None
        core.complete(step, self._end)
        if step.idled or len(core.outcomes) != outcomes:
            self._jump.forget()  # an attempt has left or is delayed by a step

    def _foresee(self) -> float:
        core, scheduler, inbox = self._core, self._core.scheduler, self._inbox
        step, at, decided = scheduler.step, core.at, self._step
        if decided is not None:
            step, at, batch = step + 1, self._end, scheduler.batch
            ending = batch.count and batch.next_end() == step
            if core.pausing or decided.idled or ending:
                return at
        if inbox.due <= at:
            return at
        if self._jump.plan(step, at):
            return self._jump.end
        return math.nextafter(at, math.inf) if scheduler.can_run() else inbox.due

    def _steps_by(self, now: float) -> int:
        """Whole steps of the current jump that are finished by now."""
        if self._step is not None:
            return 0
        return self._jump.steps_by(self._core.scheduler.step, self._core.at, now)

    # -- steps, for whoever follows single tokens --------------------------------------------

    def progress(self, now: float) -> dict[int, int]:
        """New tokens so far of every attempt, at a time not after next_at."""
        core = self._core
        step = core.scheduler.step + self._steps_by(now)
        return {number: a.tokens_at(step) - a.context for number, a in core.requests.items()}

    def due_step(self, attempt: int, tokens: int) -> int | None:
        """The step in which an attempt will have made `tokens` new tokens if nothing changes; None
        while it waits or prefills."""
        live = self._core.requests.get(attempt)
        if live is None or live.state != DECODING:
            return None
        return live.context + tokens - live.shift

    def step_at(self, step: int) -> float:
        """The end of this step, in seconds. Infinite if it is not decided yet; then ask again after
        the time of next_at."""
        last, at = self._core.scheduler.step, self._core.at
        if self._step is not None:
            last, at = last + 1, self._end
        return at if step <= last else self._jump.end_of(step, last, at)

    def spans_of(self, attempt: int, tokens: int) -> tuple[tuple[int, int], ...]:
        """(version, tokens) of the first `tokens` new tokens of an attempt, all already made."""
        spans: list[tuple[int, int]] = []
        for version, count in self._core.requests[attempt].spans:
            if tokens:
                spans.append((version, min(count, tokens)))
                tokens -= spans[-1][1]
        return (*spans, (self._core.version, tokens)) if tokens else tuple(spans)

    # -- what it shows -----------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._core.version

    @property
    def paused(self) -> bool:
        return self._core.scheduler.gate != RUN_ALL

    def gauges(self) -> SimGauges:
        """Load and counters, as of the last call of `advance`."""
        core, now = self._core, self._inbox.now
        scheduler, counters = core.scheduler, core.scheduler.counters
        batch, steps = scheduler.batch, self._steps_by(now)
        used = self.spec.kv_blocks - scheduler.kv.free + batch.demand(scheduler.step, steps)
        tokens = batch.count * steps
        drafts, drafted, accepted = counters.drafted.totals(batch.count, tokens)
        return SimGauges(
            len(scheduler.running),
            scheduler.queue.size,
            used,
            used / self.spec.kv_blocks,
            counters.preemptions,
            counters.prefill_tokens,
            counters.cached_tokens,
            counters.reprefilled_tokens,
            counters.generated_tokens + tokens,
            scheduler.step + steps,
            drafts,
            drafted,
            accepted,
        )

    # -- for tests -------------------------------------------------------------------------

    def eviction_order(self) -> Iterator[tuple[tuple[Hashable, ...], int]]:
        """(chain, block number) of the cached free blocks, next to be evicted first."""
        return self._core.scheduler.kv.eviction_order()

    def check_invariants(self) -> None:
        """Raises AssertionError with the first violated invariant. Costs O(all attempts)."""
        self._core.check_invariants(self._step)
