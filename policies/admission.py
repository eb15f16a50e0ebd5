"""Admission: how many requests the scheduler sends to one instance at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from rollout_sched.core.model.events import InstanceReported
from rollout_sched.core.model.roles import Admission, Instance, SessionAdmission, Siblings

Positive = Annotated[float, msgspec.Meta(gt=0)]


class Unbounded(Admission, msgspec.Struct, frozen=True):
    """No limit; the queue is inside the instances, where the scheduler cannot rebalance it."""

    weighs_tokens = False

    def admits(self, instance: Instance) -> bool:
        return True


class Slots(Admission, msgspec.Struct, frozen=True):
    """At most `factor` times the sequences that the instance runs at once."""

    factor: Positive = 1.0
    weighs_tokens = False

    def admits(self, instance: Instance) -> bool:
        return len(instance.attempts) < instance.slots * self.factor


class KvTokens(Admission, msgspec.Struct, frozen=True):
    """As many as there are slots, while resident and expected tokens fit `fill` of the KV cache.

    Engines admit requests until they thrash; keeping the sum of expected contexts under the
    capacity avoids preemptions (ThunderAgent, vllm-router's program scheduling). An idle instance
    always takes one.
    """

    fill: Positive = 1.0

    def admits(self, instance: Instance) -> bool:
        return not instance.attempts or (
            instance.in_flight < instance.slots and instance.tokens < instance.kv_tokens * self.fill
        )


class KvGrowth(Admission, msgspec.Struct, frozen=True):
    """As many as there are slots, while their grown contexts fit `fill` of the KV cache.

    Each request is expected to grow to the mean final context of those that finished on it before
    (llm-d's admission of rollouts by estimated KV growth); a better prediction counts through
    `Instance.tokens`. An idle instance always takes one.
    """

    fill: Positive = 1.0
    counts_finished = True

    def admits(self, instance: Instance) -> bool:
        in_flight = len(instance.attempts)
        if not in_flight:
            return True
        grown = instance.finished_tokens / max(1, instance.finished)
        resident = max(instance.tokens, in_flight * grown)
        room = instance.kv_tokens * self.fill - resident
        return in_flight < instance.slots and room >= resident / in_flight


class Concurrency(msgspec.Struct, frozen=True):
    """The state that `AimdConcurrency` keeps of an instance between reports.

    limit     on its sessions
    finished  how many requests had finished on it when the limit was last changed
    rest      reports until the limit may change again
    queued    reports in a row with a long queue
    cut       whether the last change was a cut
    """

    limit: float
    finished: int = 0
    rest: int = 0
    queued: int = 0
    cut: bool = False


class AimdConcurrency(SessionAdmission, msgspec.Struct, frozen=True):
    """A cap on the trajectories of an instance, raised and cut according to its gauges.

    prime-rl's adaptive concurrency (PrimeIntellect-ai/prime-rl, orchestrator/concurrency.py), per
    instance: the cap starts at KV capacity / `longest` (tokens of the longest possible context). It
    grows once as many requests as it allows have finished, if it binds: by 1.2 at no KV use,
    tapering linearly to 1.0 at 0.8 (prime-rl#3556). It is cut to in-flight * 0.7 / use if KV use is
    above 0.8, by 0.8 after a preemption, by 0.9 if for 6 reports in a row half as many requests
    waited as ran, and to a half if a cut did not help; then it does not change for 6 reports.
    Running requests are never cancelled: vLLM itself preempts them, and the excess trajectories run
    to their end.
    """

    longest: Annotated[int, msgspec.Meta(ge=1)] = 32_768
    most: Annotated[int, msgspec.Meta(ge=1)] = 1024
    counts_finished = True
    weighs_tokens = False

    def admits(self, instance: Instance) -> bool:
        return len(instance.attempts) < instance.slots

    def begins(self, instance: Instance) -> bool:
        return instance.sessions < self._of(instance).limit

    def continues(self, instance: Instance) -> bool:
        return True

    def observe(self, instance: Instance, report: InstanceReported) -> Concurrency:
        last = self._of(instance)
        queued = last.queued + 1 if report.waiting > 0.5 * report.running else 0
        if last.rest:
            return Concurrency(last.limit, last.finished, last.rest - 1, queued, last.cut)
        limit = self._cut(instance, report, last.limit, queued)
        if limit is not None:
            limit = min(limit, 0.5 * last.limit) if last.cut else limit
            return Concurrency(max(1.0, limit), instance.finished, rest=6, cut=True)
        turned_over = instance.finished - last.finished >= last.limit
        binds = instance.sessions >= 0.9 * last.limit
        if binds and turned_over:
            grown = last.limit * (1 + 0.25 * (0.8 - report.kv_usage))
            return Concurrency(min(self.most, grown), instance.finished, queued=queued)
        return Concurrency(last.limit, last.finished, 0, queued, last.cut)

    def _cut(
        self, instance: Instance, report: InstanceReported, limit: float, queued: int
    ) -> float | None:
        before = instance.report
        if report.kv_usage > 0.8:
            return min(limit, instance.sessions * 0.7 / report.kv_usage)
        if report.preemptions > (before.preemptions if before else 0):
            return 0.8 * limit
        return 0.9 * limit if queued >= 6 else None

    def _of(self, instance: Instance) -> Concurrency:
        kept: Concurrency | None = instance.observed
        if kept is not None:
            return kept
        return Concurrency(min(self.most, max(1.0, instance.kv_tokens / self.longest)))


class SessionLoad(msgspec.Struct, frozen=True):
    """The state that `SessionCap` keeps of an instance between reports.

    share   of the KV that sessions may fill, what is left after preemptions
    tokens  of KV that a session holds on average
    """

    share: float
    tokens: float


class SessionCap(SessionAdmission, msgspec.Struct, frozen=True):
    """As many trajectories as the KV cache holds from turn to turn.

    If it holds fewer, each turn evicts KV that another trajectory needs when its tool returns, and
    every turn is prefilled again. So a trajectory begins only if the KV that the present
    trajectories hold now, including those whose tool runs, plus the KV that it will hold in the end
    fit `fill` of the cache. If they have outgrown `overfill` of it, the next ones to return give up
    their KV and wait until there is room (ThunderAgent's pause and resume under KV pressure, arXiv
    2602.13692; the cost of a trajectory is prime-rl's, the mean final context). For running
    trajectories the instance reports what they hold; for the others the policy counts it, with a
    prompt that samples share counted once. A preemption means that it was too much, and reduces
    both bounds by a fifth; they grow back by 2 % per report.
    """

    fill: Positive = 1.0
    overfill: Positive = 1.2
    counts_finished = True
    weighs_tokens = False

    def admits(self, instance: Instance) -> bool:
        return len(instance.attempts) < instance.slots

    def begins(self, instance: Instance) -> bool:
        load: SessionLoad | None = instance.observed
        sessions = instance.sessions
        if load is None or not sessions:
            return True
        grown = instance.finished_tokens / max(1, instance.finished)
        held, newcomer = sessions * load.tokens, max(load.tokens, grown)
        return held + newcomer <= instance.kv_tokens * self.fill * load.share

    def continues(self, instance: Instance) -> bool:
        load: SessionLoad | None = instance.observed
        if load is None:
            return True
        most = instance.kv_tokens * self.overfill * load.share
        return instance.sessions * load.tokens <= most

    def observe(self, instance: Instance, report: InstanceReported) -> SessionLoad:
        last: SessionLoad | None = instance.observed
        before = 0 if instance.report is None else instance.report.preemptions
        share = 1.0 if last is None else last.share
        share = 0.8 * share if report.preemptions > before else min(1.0, 1.02 * share)
        prompts: set[str] = set()
        in_flight = instance.attempts.values()
        running = _tokens(((a.request.siblings, a.context_tokens) for a in in_flight), prompts)
        kept = _tokens(
            ((r.siblings, r.context_tokens) for r in instance.resident.values()), prompts
        )
        held = max(running, report.kv_usage * instance.kv_tokens) + kept
        return SessionLoad(share, held / max(1, instance.sessions))


def _tokens(contexts: Iterable[tuple[Siblings, int]], prompts: set[str]) -> int:
    """Tokens of KV of these contexts, without the `prompts` that are counted already."""
    tokens = 0
    for siblings, context_tokens in contexts:
        shared = siblings.id in prompts
        tokens += context_tokens - siblings.prompt_tokens if shared else context_tokens
        prompts.add(siblings.id)
    return tokens
