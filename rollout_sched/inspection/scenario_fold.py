"""Collects the times of a run from its journal: of attempts, training steps, updates, instances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from rollout_sched.core.model.actions import (
    Deliver,
    Dispatch,
    Judge,
    Lend,
    Pause,
    Resume,
    UpdateWeights,
)
from rollout_sched.core.model.events import (
    Answered,
    BatchRequested,
    GateClosed,
    GroupJudged,
    GroupSubmitted,
    InstanceJoined,
    InstanceLeaving,
    InstanceLost,
    InstanceReported,
    InstanceReturned,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestSubmitted,
    Restored,
    TokensArrived,
    TurnFinished,
    WeightsPublished,
    WeightsUpdated,
)
from rollout_sched.inspection.engine_fit import EngineAttempt, Standstill
from rollout_sched.inspection.rounds import Round
from rollout_sched.metrics.fold import Handler

#: Who pauses instances: the scheduler, for weights, and a trainer on their GPUs.
_SCHEDULER, _TRAINER = "scheduler", "trainer"


class RunTimes(NamedTuple):
    """Seconds.

    total_s       from the first prompt to the last delivery
    generation_s  that the trainer waited for batches
    trainer_s     from deliveries to publications
    weights_s     of updates, on average over the instances
    """

    total_s: float
    generation_s: float
    trainer_s: float
    weights_s: float


@dataclass(slots=True)
class TrainerStep:
    """A step of the trainer.

    parts  (time, tokens, share of the GPUs that trains from then on); tokens of 0: only the share
           has changed
    """

    requested_s: float
    parts: list[tuple[float, int, float]] = field(default_factory=list)
    delivered_s: float | None = None
    published_s: float | None = None

    @property
    def tokens(self) -> int:
        return sum([tokens for _, tokens, _ in self.parts])

    @property
    def train_s(self) -> float | None:
        """None if it was not published."""
        if self.delivered_s is None or self.published_s is None:
            return None
        return self.published_s - self.delivered_s

    def left_s(self, seconds_per_token: float) -> float:
        """Training that is left at the delivery, on all GPUs."""
        left, since, share = 0.0, self.requested_s, 0.0
        for at, tokens, now_share in self.parts:
            left = max(0.0, left - (at - since) * share) + seconds_per_token * tokens
            since, share = at, now_share
        return left


class ScenarioFold:
    """Collects the times of a run. With `rounds`, clients that come in rounds are its trainer.

    `keeps_kv`: whether instances keep their KV cache while a trainer uses their GPUs.
    """

    def __init__(self, rounds: Sequence[Round] = (), *, keeps_kv: bool = False) -> None:
        self.rounds = rounds
        self._clears = not keeps_kv
        self.joined: dict[str, InstanceJoined] = {}
        self.attempts: list[EngineAttempt] = []
        self.steps: list[TrainerStep] = []
        self.updates: dict[str, list[float]] = {}
        self.judged_s: list[float] = []
        self.faults: list[dict[str, Any]] = []
        self.poll_s: list[float] = []
        self.stream_s: list[float] = []
        self.drafted = self.reported = self.colocated = self.groups = self.published = False
        self.last_s = 0.0
        self._began_s: float | None = None
        self._over_s = 0.0
        self._open: dict[int, EngineAttempt] = {}
        self._pauses: dict[str, list[Standstill]] = {}
        self._stopped: dict[tuple[str, str], tuple[float, bool]] = {}  # by instance and owner
        self._updating: dict[str, float] = {}
        self._update_times: list[tuple[float, float]] = []
        self._judging: dict[tuple[str, int], float] = {}
        self._gone: dict[str, dict[str, Any]] = {}
        self._reported_at: dict[str, float] = {}
        self._streamed_at: dict[int, float] = {}
        self._cached: dict[str, set[tuple[str, int]]] = {}  # texts and salts, by instance
        self._lent: set[str] = set()

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            InstanceJoined: self._joins,
            InstanceLeaving: self._leaves,
            InstanceLost: self._is_lost,
            InstanceReported: self._reports,
            GroupSubmitted: self._submitted,
            RequestSubmitted: self._asked,
            Restored: self._restarts,
            TokensArrived: self._streamed,
            RequestFinished: self._ended,
            RequestInterrupted: self._ended,
            TurnFinished: self._ended,
            RequestFailed: self._failed,
            BatchRequested: self._requested,
            WeightsPublished: self._published,
            WeightsUpdated: self._updated,
            GateClosed: lambda now, event: self._update(now, event.instance),
            GroupJudged: self._verdict,
            InstanceReturned: self._returned,
            Dispatch: self._begun,
            Deliver: self._delivered,
            Judge: self._judge,
            Lend: self._lends,
            Pause: lambda now, action: self._paused(now, action.instance, action.clear_cache),
            Resume: lambda now, action: self._resumed(now, action.instance),
            UpdateWeights: lambda now, action: self._update(now, action.instance),
        }

    def observe(self, now: float, event: Any, actions: Any) -> None:
        self.last_s = now

    def close(self) -> None:
        """The journal ends."""
        for attempt in self._open.values():
            attempt.ended_s = self.last_s
        for name in self.joined:
            self._resumes_for_all(self.last_s, name)
        if not self.groups:
            self._steps_of_rounds()

    @property
    def in_rounds(self) -> bool:
        """Whether the steps are rounds of requests."""
        return bool(self.rounds) and not self.groups

    def pauses(self) -> dict[str, list[Standstill]]:
        """When each instance stood still, in order."""
        found: dict[str, list[Standstill]] = {}
        for name, pauses in self._pauses.items():
            merged: list[Standstill] = []
            for one in sorted(pauses):
                if merged and one.since <= merged[-1].until:
                    last = merged.pop()
                    until = max(one.until, last.until)
                    one = Standstill(last.since, until, one.cleared or last.cleared)
                merged.append(one)
            found[name] = merged
        return found

    @property
    def times(self) -> RunTimes:
        steps = [step for step in self.steps if step.delivered_s is not None]
        waits = [step.delivered_s - step.requested_s for step in steps if step.delivered_s]
        trained = [step.train_s for step in steps if step.train_s is not None]
        updates = [seconds for each in self.updates.values() for seconds in each]
        return RunTimes(
            max(0.0, self._over_s - self.began_s),
            sum(waits),
            sum(trained),
            sum(updates) / max(1, len(self.joined)),
        )

    @property
    def began_s(self) -> float:
        """The first prompt, or the first instance if that came later."""
        return self._began_s or 0.0

    # -- instances -----------------------------------------------------------------------------

    def _joins(self, now: float, event: InstanceJoined) -> None:
        name = event.instance
        fault = self._gone.pop(name, None)
        if name not in self.joined:
            self.joined[name] = event
            if len(self.joined) == 1 and self._began_s is not None:
                self._began_s = now
            if self._began_s is not None and now > self._began_s:
                self.faults.append({"what": "joins", "at_s": now, "name": name})
        elif fault is not None:
            fault["returns_after_s"] = now - fault.pop("gone_s")

    def _leaves(self, now: float, event: InstanceLeaving) -> None:
        fault = {"what": "leaving", "at_s": now, "name": event.instance}
        self._gone[event.instance] = fault
        self.faults.append(fault)

    def _is_lost(self, now: float, event: InstanceLost) -> None:
        name = event.instance
        if name not in self._gone:
            self._gone[name] = {"what": "lost", "at_s": now, "name": name}
            self.faults.append(self._gone[name])
        self._gone[name]["gone_s"] = now
        self._updating.pop(name, None)
        self._resumes_for_all(now, name)
        for number, attempt in list(self._open.items()):
            if attempt.instance == name:
                self._close(now, number)

    def _reports(self, now: float, event: InstanceReported) -> None:
        before = self._reported_at.get(event.instance)
        if before is not None and now > before:
            self.poll_s.append(now - before)
        self._reported_at[event.instance] = now
        self.drafted |= event.drafted_tokens > 0
        self.reported |= event.generated_tokens > 0

    def _restarts(self, now: float, event: Restored) -> None:
        self.faults.append({"what": "scheduler_restarts", "at_s": now})
        for number in list(self._open):
            self._close(now, number)
        for name in self.joined:
            self._resumes_for_all(now, name)
        self._updating.clear()
        self._judging.clear()

    def _paused(self, now: float, name: str, cleared: bool, by: str = _SCHEDULER) -> None:
        self._stopped.setdefault((name, by), (now, cleared))
        if cleared:
            self._cached.pop(name, None)

    def _resumed(self, now: float, name: str, by: str = _SCHEDULER) -> None:
        since, cleared = self._stopped.pop((name, by), (now, False))
        if now > since:
            self._pauses.setdefault(name, []).append(Standstill(since, now, cleared))

    def _resumes_for_all(self, now: float, name: str) -> None:
        self._resumed(now, name)
        self._resumed(now, name, _TRAINER)

    # -- attempts ------------------------------------------------------------------------------

    def _begun(self, now: float, action: Dispatch) -> None:
        cached = self._cached.setdefault(action.instance, set())
        own, shared = (action.request, action.salt), (action.group or action.request, action.salt)
        known = 0
        if own in cached:
            known = action.computed_tokens
        elif shared in cached:
            known = action.context_tokens - action.response_tokens  # observations are few
        cached |= {own, shared}
        self._open[action.attempt] = attempt = EngineAttempt(
            action.instance,
            action.request,
            now,
            action.context_tokens,
            max(1, action.context_tokens - known),
        )
        self.attempts.append(attempt)

    def _streamed(self, now: float, event: TokensArrived) -> None:
        attempt = self._open.get(event.attempt)
        if attempt is not None:
            attempt.tokens = event.tokens
            since = self._streamed_at.get(event.attempt)
            if since is not None and now > since:
                self.stream_s.append(now - since)
            self._streamed_at[event.attempt] = now

    def _ended(self, now: float, event: Answered) -> None:
        attempt = self._open.get(event.attempt)
        if attempt is not None:
            attempt.tokens, attempt.known = event.tokens, True
            self._close(now, event.attempt)

    def _failed(self, now: float, event: RequestFailed) -> None:
        if event.attempt in self._open:
            self._close(now, event.attempt)

    def _close(self, now: float, number: int) -> None:
        self._open.pop(number).ended_s = now
        self._streamed_at.pop(number, None)

    # -- the trainer ---------------------------------------------------------------------------

    def _submitted(self, now: float, event: GroupSubmitted) -> None:
        self.groups = True
        self._asked(now, event)

    def _asked(self, now: float, event: Any) -> None:
        if self._began_s is None:
            self._began_s = now

    def _requested(self, now: float, event: BatchRequested) -> None:
        self.colocated = event.shares_gpus
        last = self.steps[-1] if self.steps else None
        if last is None or last.delivered_s is not None:
            if last is not None and last.published_s is None:
                last.published_s = now
            self.steps.append(TrainerStep(now))
            if self.colocated:
                for name in self.joined:
                    self._resumed(now, name, _TRAINER)
                self._lent.clear()

    def _delivered(self, now: float, action: Deliver) -> None:
        if not self.steps or self.steps[-1].delivered_s is not None:
            return
        step = self.steps[-1]
        tokens = sum([s.prompt_tokens + s.response_tokens for s in action.samples])
        step.parts.append((now, tokens, self._share()))
        self._over_s = now
        if action.last:
            step.delivered_s = now
            if self.colocated:
                for name in self.joined:
                    self._paused(now, name, self._clears, _TRAINER)

    def _share(self) -> float:
        return len(self._lent) / max(1, len(self.joined)) if self.colocated else 1.0

    def _lends(self, now: float, action: Lend) -> None:
        self._lent.add(action.instance)
        self._share_changed(now)

    def _returned(self, now: float, event: InstanceReturned) -> None:
        self._lent.discard(event.instance)
        self._share_changed(now)

    def _share_changed(self, now: float) -> None:
        if self.steps and self.steps[-1].delivered_s is None:
            self.steps[-1].parts.append((now, 0, self._share()))

    def _published(self, now: float, event: WeightsPublished) -> None:
        self.published = True
        if self.steps and self.steps[-1].delivered_s is not None:
            self.steps[-1].published_s = self.steps[-1].published_s or now

    def _update(self, now: float, name: str) -> None:
        self._updating[name] = now

    def _updated(self, now: float, event: WeightsUpdated) -> None:
        since = self._updating.pop(event.instance, None)
        if since is not None:
            self.updates.setdefault(event.instance, []).append(now - since)
            self._update_times.append((since, now))

    def _judge(self, now: float, action: Judge) -> None:
        self._judging[action.group, action.judgement] = now

    def _verdict(self, now: float, event: GroupJudged) -> None:
        since = self._judging.pop((event.group, event.judgement), None)
        if since is not None:
            self.judged_s.append(now - since)

    def _steps_of_rounds(self) -> None:
        tokens: dict[str, int] = {}
        for attempt in self.attempts:
            tokens[attempt.request] = attempt.context_tokens + attempt.tokens
        for one in self.rounds:
            if one.ended_s:
                over = self._over_s = max(one.ended_s.values())
                made = sum([tokens.get(request, 0) for request in one.ended_s])
                self.steps.append(TrainerStep(one.began_s, [(over, made, 1.0)], over))
        if not self.steps:  # clients that come when they like
            self._over_s = max([attempt.ended_s for attempt in self.attempts], default=0.0)
        for step, after in pairwise(self.steps):
            step.published_s = after.requested_s - self._longest_update_s(
                step.parts[-1][0], after.requested_s
            )

    def _longest_update_s(self, since: float, until: float) -> float:
        """Of those that ended in this time: it is not the trainer's."""
        ended = [
            end - max(begin, since) for begin, end in self._update_times if since < end <= until
        ]
        return max(ended, default=0.0)
