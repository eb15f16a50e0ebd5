"""Outages: instances that were lost or left, attempts that failed, and the consequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollout_sched.core.model.actions import Answer, Discard
from rollout_sched.core.model.events import (
    InstanceJoined,
    InstanceLost,
    RequestFailed,
    RequestSubmitted,
    Restored,
    TokensArrived,
)
from rollout_sched.metrics.fold import Handler, quantile


class OutageFigures(msgspec.Struct, frozen=True):
    """Outages of a whole run.

    instances_lost      number of losses of an instance that was not asked to leave
    instances_left      number of times that an instance left on request
    instances_returned  number of times that an instance came back
    away_s              instance-seconds between going and coming back, or the end
    failed_attempts     attempts without an answer, except those on an instance that was lost
    failed_prompts      groups that could never be whole
    scheduler_restarts  number of times that the scheduler died and another one continued
    """

    instances_lost: int
    instances_left: int
    instances_returned: int
    away_s: float
    failed_attempts: int
    failed_prompts: int
    scheduler_restarts: int = 0


class OutageFold:
    """Folds arrivals and losses of instances, and failures."""

    def __init__(self) -> None:
        self._lost = self._left = self._returned = self._failed_attempts = 0
        self._away_s = 0.0
        self._here: set[str] = set()
        self._gone_at: dict[str, float] = {}
        self._failed_prompts: set[str] = set()
        self._restarts = 0

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            InstanceJoined: self._joined,
            InstanceLost: self._gone,
            RequestFailed: self._failed,
            Discard: self._discarded,
            Restored: self._restored,
        }

    def figures(self, total_s: float) -> OutageFigures:
        """The figures of a run that took `total_s` seconds."""
        return OutageFigures(
            instances_lost=self._lost,
            instances_left=self._left,
            instances_returned=self._returned,
            away_s=self._away_s + sum(total_s - at for at in self._gone_at.values()),
            failed_attempts=self._failed_attempts,
            failed_prompts=len(self._failed_prompts),
            scheduler_restarts=self._restarts,
        )

    def _joined(self, now: float, event: InstanceJoined) -> None:
        if event.instance in self._here:  # it restarted before the loss was noticed
            self._gone(now, InstanceLost(event.instance))
        self._here.add(event.instance)
        gone_at = self._gone_at.pop(event.instance, None)
        if gone_at is not None:
            self._returned += 1
            self._away_s += now - gone_at

    def _gone(self, now: float, event: InstanceLost) -> None:
        name = event.instance
        if name not in self._here:
            return
        self._here.remove(name)
        self._gone_at[name] = now
        if event.requested:
            self._left += 1
        else:
            self._lost += 1

    def _failed(self, now: float, event: RequestFailed) -> None:
        self._failed_attempts += 1

    def _discarded(self, now: float, action: Discard) -> None:
        if action.ends and action.reason == "failed" and action.group:
            self._failed_prompts.add(action.group)

    def _restored(self, now: float, event: Restored) -> None:
        """The instances join again, but were not away."""
        self._restarts += 1
        self._here.clear()


class DirectFigures(msgspec.Struct, frozen=True):
    """Direct requests of a whole run.

    submitted      all of them; those not in the next three were in flight at the end
    answered       with a response
    withdrawn      the client had gone
    failed         given up, or broken off when the scheduler restarted
    tokens         of the responses
    latency_*_s    from submission to answer, of answered requests
    first_token_*  the same to the first token that the scheduler heard of, so late by up to the
                   interval at which it hears of streams; None if nothing is streamed
    """

    submitted: int
    answered: int
    withdrawn: int
    failed: int
    tokens: int
    latency_p50_s: float
    latency_p99_s: float
    first_token_p50_s: float | None
    first_token_p99_s: float | None


class DirectFold:
    """Folds submissions, answers and discards."""

    def __init__(self) -> None:
        self._submitted = 0
        self._tokens = 0
        self._ended = {"withdrawn": 0, "failed": 0}
        self._since: dict[str, float] = {}
        self._first: dict[str, float] = {}  # seconds to the first token, of unanswered requests
        self._latencies: list[float] = []
        self._firsts: list[float] = []
        self._streamed = False

    def handlers(self) -> Mapping[type[Any], Handler]:
        return {
            RequestSubmitted: self._asked,
            TokensArrived: self._arrived,
            Answer: self._answered,
            Discard: self._discarded,
            Restored: self._restored,
        }

    def figures(self) -> DirectFigures:
        latencies, firsts = sorted(self._latencies), sorted(self._firsts)
        return DirectFigures(
            submitted=self._submitted,
            answered=len(latencies),
            withdrawn=self._ended["withdrawn"],
            failed=self._ended["failed"],
            tokens=self._tokens,
            latency_p50_s=quantile(latencies, 0.5),
            latency_p99_s=quantile(latencies, 0.99),
            first_token_p50_s=quantile(firsts, 0.5) if self._streamed else None,
            first_token_p99_s=quantile(firsts, 0.99) if self._streamed else None,
        )

    def _asked(self, now: float, event: RequestSubmitted) -> None:
        self._submitted += 1
        self._since[event.request] = now

    def _arrived(self, now: float, event: TokensArrived) -> None:
        since = self._since.get(event.request)
        if since is not None and event.tokens:
            self._streamed = True
            self._first.setdefault(event.request, now - since)

    def _answered(self, now: float, action: Answer) -> None:
        request = action.sample.request
        latency_s = now - self._since.pop(request)
        self._tokens += action.sample.response_tokens
        self._latencies.append(latency_s)
        self._firsts.append(self._first.pop(request, latency_s))  # a short one may end unreported

    def _discarded(self, now: float, action: Discard) -> None:
        if action.ends and self._since.pop(action.request, None) is not None:
            self._first.pop(action.request, None)
            self._ended["withdrawn" if action.reason == "withdrawn" else "failed"] += 1

    def _restored(self, now: float, event: Restored) -> None:
        """The connections of earlier requests ended with the earlier scheduler."""
        self._ended["failed"] += len(self._since)
        self._since.clear()
        self._first.clear()
