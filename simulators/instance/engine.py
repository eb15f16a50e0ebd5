"""The boundary between two steps: inputs take effect, attempts end, pauses begin."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, get_args

from rollout_sched.simulators.instance.model import (
    Ended,
    InstanceSpec,
    Outcome,
    Paused,
    PauseMode,
    Reason,
    SimRequest,
)
from rollout_sched.simulators.instance.scheduler import (
    ARRIVING,
    DECODING,
    RUN_ADMITTED,
    RUN_NOTHING,
    WAITING,
    DecidedStep,
    SimAttempt,
    StepScheduler,
)


class Inbox:
    """The inputs in the order of arrival; `due` is the time of the first, infinite if none.

    Aborts also have a faster path: an abort during a step applies before the step's results.
    `aborts` has the candidates for that, (time, attempt).
    """

    __slots__ = ("_posts", "aborts", "count", "due", "now")

    def __init__(self) -> None:
        self.now = -math.inf
        self.due = math.inf
        self.count = 0
        self._posts: deque[tuple[float, Callable[[Any], None], Any]] = deque()
        self.aborts: deque[tuple[float, int]] = deque()

    def clock(self, now: float) -> None:
        """Raises ValueError if now is before an earlier call."""
        if now < self.now:
            raise ValueError(f"time went back from {self.now} to {now}")
        self.now = now

    def post(self, take_effect: Callable[[Any], None], argument: Any = None) -> None:
        """Call `take_effect(argument)` at the next boundary."""
        self.count += 1
        if not self._posts:
            self.due = self.now
        self._posts.append((self.now, take_effect, argument))

    def take(self) -> None:
        """The first input takes effect; there must be one."""
        _, take_effect, argument = self._posts.popleft()
        self.due = self._posts[0][0] if self._posts else math.inf
        take_effect(argument)

    def post_abort(self, take_effect: Callable[[Any], None], attempt: int) -> None:
        self.post(take_effect, attempt)
        self.aborts.append((self.now, attempt))

    def aborts_within(self, end: float) -> list[int]:
        """The attempts whose aborts came before the end of this step, each returned once."""
        aborts, found = self.aborts, []
        while aborts and aborts[0][0] < end:
            found.append(aborts.popleft()[1])
        return found

    def forget_aborts(self, at: float) -> None:
        """Aborts that came by `at` take effect as normal inputs."""
        while self.aborts and self.aborts[0][0] <= at:
            self.aborts.popleft()


class EngineCore:
    """The scheduler of one instance with all its attempts, as of the last boundary.

    requests  by number, in order of arrival
    at        time of the last boundary, in seconds
    outcomes  results not taken yet
    """

    __slots__ = ("_inbox", "_pauses", "at", "outcomes", "requests", "scheduler", "version")

    def __init__(self, spec: InstanceSpec, version: int, inbox: Inbox) -> None:
        self.scheduler = StepScheduler(spec)
        self.scheduler.time.set_version(version)
        self.version = version
        self.at = inbox.now
        self.requests: dict[int, SimAttempt] = {}
        self.outcomes: list[Outcome] = []
        self._pauses: list[tuple[PauseMode, bool]] = []  # not yet complete
        self._inbox = inbox

    @property
    def pausing(self) -> bool:
        """Whether a pause waits for the step in progress."""
        return bool(self._pauses)

    def accept(self, request: SimRequest, last_token: int, reason: Reason) -> SimAttempt:
        """A new attempt, not queued yet. Raises ValueError if its stream has an attempt already."""
        kv, number = self.scheduler.kv, request.attempt
        blocks = request.shared_tokens // self.scheduler.spec.block_size
        shared = kv.chain((request.salt, request.prompt_stream))
        own = kv.chain((request.salt, request.prompt_stream, blocks, request.stream))
        if own.owner is not None:
            raise ValueError(
                f"attempt {number}: stream {request.stream!r} already has attempt {own.owner} "
                f"here; abort that one or give the copy its own stream"
            )
        own.owner = number
        attempt = SimAttempt(request, last_token, reason, self._inbox.count, shared, own, blocks)
        self.requests[number] = attempt
        return attempt

    # -- inputs taking effect --------------------------------------------------------------

    def enqueue(self, attempt: SimAttempt) -> None:
        self.scheduler.add(attempt)

    def abort(self, number: int) -> None:
        self._inbox.forget_aborts(self.at)
        attempt = self.requests.get(number)
        if attempt is not None and attempt.state != ARRIVING:
            self._finish(attempt, "abort")
            self._complete_pauses()

    def pause(self, pause: tuple[PauseMode, bool]) -> None:
        mode, clear_cache = pause
        scheduler = self.scheduler
        if mode == "abort":
            for attempt in [a for a in self.requests.values() if a.state != ARRIVING]:
                self._finish(attempt, "abort")
        scheduler.gate = RUN_NOTHING if mode == "keep" else RUN_ADMITTED
        if scheduler.can_run():
            self._pauses.append(pause)
        else:
            self._complete_pause(mode, clear_cache)
            self._complete_pauses()

    def resume(self, _: None) -> None:
        self.scheduler.reopen()

    def set_version(self, version: int) -> None:
        for attempt in self.requests.values():
            attempt.close_span(attempt.tokens_at(self.scheduler.step), self.version)
        self.scheduler.time.set_version(version)
        self.version = version

    def update_drafter(self, _: None) -> None:
        self.scheduler.time.update_drafter()

    def clear_cache(self, preempt: bool) -> None:
        self.scheduler.clear_cache(preempt)

    # -- the end of a step -----------------------------------------------------------------

    def jump(self, steps: int, end: float) -> None:
        """`steps` steps without a decision have ended."""
        self.scheduler.jump(steps)
        self.at = end
        self._conclude([])

    def complete(self, step: DecidedStep, end: float) -> None:
        self.scheduler.complete(step)
        self.at = end
        self._conclude(step.idled)

    def _conclude(self, idled: list[SimAttempt]) -> None:
        """Aborts that came while the step ran apply before its results, as in vLLM."""
        if self._inbox.aborts:
            self._abort_early(idled)
        scheduler = self.scheduler
        for attempt in scheduler.batch.ending(scheduler.step):
            self._finish(attempt, attempt.reason)
        if self._pauses:
            self._complete_pauses()

    def _abort_early(self, idled: list[SimAttempt]) -> None:
        for number in self._inbox.aborts_within(self.at):
            attempt = self.requests.get(number)
            if attempt is not None and attempt.state != ARRIVING:
                got_token = attempt.state == DECODING and attempt not in idled
                self._finish(attempt, "abort", lost=int(got_token))

    def _finish(self, attempt: SimAttempt, reason: Reason, lost: int = 0) -> None:
        self.scheduler.remove(attempt, lost)
        attempt.close_span(attempt.tokens, self.version)
        del self.requests[attempt.number]
        own = attempt.own
        if own.owner == attempt.number:
            own.owner = None
        tokens = attempt.tokens - attempt.context
        cached = attempt.cached if tokens else 0
        self.outcomes.append(Ended(attempt.number, tokens, attempt.spans, reason, self.at, cached))

    def _complete_pauses(self) -> None:
        """Pauses that had to wait are complete as soon as nothing can run, for whatever reason. As
        in vLLM, a resume in between does not cancel them."""
        if self._pauses and not self.scheduler.can_run():
            for mode, clear_cache in self._pauses:
                self._complete_pause(mode, clear_cache)
            self._pauses.clear()

    def _complete_pause(self, mode: PauseMode, clear_cache: bool) -> None:
        if clear_cache:
            self.scheduler.clear_cache(preempt=True)
        self.outcomes.append(Paused(mode, self.at))

    # -- for tests -------------------------------------------------------------------------

    def check_invariants(self, under_way: DecidedStep | None) -> None:
        waiting = sum(1 for a in self.requests.values() if a.state == WAITING)
        assert waiting == self.scheduler.queue.size, "queued attempts are miscounted"
        self.scheduler.check_invariants(under_way)


def check_pause_mode(mode: str) -> None:
    """Raises ValueError for a mode that vLLM does not have."""
    if mode not in get_args(PauseMode):
        raise ValueError(f"pause mode must be keep, abort or wait, got {mode!r}")


def last_token(request: SimRequest, spec: InstanceSpec) -> tuple[int, Reason]:
    """Tokens at the end of a request, and the reason for its end. Raises ValueError with the limit
    if it can never run."""
    context, wanted, most = request.context_tokens, request.new_tokens, request.max_new_tokens
    if context < 1 or wanted < 1 or most < 1:
        raise ValueError(
            f"attempt {request.attempt}: context_tokens ({context}), new_tokens ({wanted}) and "
            f"max_new_tokens ({most}) must be >= 1"
        )
    if not (0 <= request.shared_tokens <= context and 0 <= request.known_tokens <= context):
        raise ValueError(
            f"attempt {request.attempt}: shared_tokens ({request.shared_tokens}) and known_tokens "
            f"({request.known_tokens}) must lie within context_tokens ({context})"
        )
    room = min(most, spec.max_model_len - context)
    if room < 1:
        raise ValueError(
            f"attempt {request.attempt}: a context of {context} tokens leaves no new token "
            f"within max_model_len {spec.max_model_len}; raise max_model_len or cut the context"
        )
    new = min(wanted, room)
    blocks = -(-(context + new - 1) // spec.block_size)  # the last token's KV is never written
    if blocks > spec.kv_blocks:
        raise ValueError(
            f"attempt {request.attempt}: {context} + {new} tokens need {blocks} blocks of "
            f"{spec.block_size}, but the instance has {spec.kv_blocks}; raise kv_blocks or lower "
            f"max_new_tokens"
        )
    return context + new, "stop" if new == wanted else "length"
