"""Routing: which open instance takes a request."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

import msgspec

from rollout_sched.core.model.roles import FleetView, Instance, RandomSource, Request, Routing
from rollout_sched.policies.affinity import (
    MARGIN,
    PREFILL_TOKENS_PER_S,
    WAIT_S,
    worth_staying,
)

Positive = Annotated[float, msgspec.Meta(gt=0)]


class RoundRobin(Routing, msgspec.Struct, frozen=True):
    """The instance whose last request was sent longest ago, whatever its load."""

    weighs_tokens = False

    def load(self, instance: Instance) -> int:
        return instance.last_dispatch


class StaticSplit(Routing, msgspec.Struct, frozen=True):
    """Each instance gets a contiguous share of the prompts launched together, with all samples.

    What trainers without a router do: the batch is cut into as many pieces as there are ranks, and
    each engine keeps its piece to the end (`DataProto.chunk` in verl; HybridFlow, arXiv
    2409.19256). Unlike the ranks in HybridFlow, the fleet may change: a share whose instance takes
    no new work goes to the least busy one, as do direct requests.
    """

    weighs_tokens = False

    def load(self, instance: Instance) -> int:
        return len(instance.attempts)

    def choose(self, request: Request, fleet: FleetView) -> Instance | None:
        group = request.group
        if group is None or not fleet.open:
            return fleet.least()
        rank = group.launch_place * len(fleet.instances) // group.launch_size
        mine = next(islice(fleet.instances.values(), rank, None))
        return fleet.open_instance(mine.id) or fleet.least()


class Random(Routing, msgspec.Struct, frozen=True):
    """A random open instance, by seeded chance."""

    rng: RandomSource
    weighs_tokens = False

    def load(self, instance: Instance) -> int:
        return 0

    def choose(self, request: Request, fleet: FleetView) -> Instance | None:
        return fleet.open[self.rng.randrange(len(fleet.open))] if fleet.open else None


class PowerOfTwo(Routing, msgspec.Struct, frozen=True):
    """Of two instances drawn by seeded chance, the one with fewer requests (Mitzenmacher 2001)."""

    rng: RandomSource
    weighs_tokens = False

    def load(self, instance: Instance) -> int:
        return instance.in_flight

    def choose(self, request: Request, fleet: FleetView) -> Instance | None:
        instances = fleet.open
        if len(instances) < 2:
            return instances[0] if instances else None
        first = self.rng.randrange(len(instances))
        second = self.rng.randrange(len(instances) - 1)
        pair = instances[first], instances[second + (second >= first)]
        return min(pair, key=lambda instance: (instance.in_flight, instance.serial))


class LeastRequests(Routing, msgspec.Struct, frozen=True):
    """The instance with the fewest requests in flight."""

    weighs_tokens = False

    def load(self, instance: Instance) -> int:
        return len(instance.attempts)


class LeastTokens(Routing, msgspec.Struct, frozen=True):
    """The instance with the fewest tokens: resident in KV plus expected by the prediction.

    The imbalance of rollouts is one of tokens, not of requests (verl issue 658: about 30 % more
    tokens on the fullest worker than on the emptiest).
    """

    def load(self, instance: Instance) -> int:
        return instance.tokens


class LengthSplit(Routing, msgspec.Struct, frozen=True):
    """Requests expected to be long go to instances that run fewer at once, so that each is faster.

    StreamRL's skewness-aware dispatch (arXiv 2504.15930): the latency of a long response is its
    length times the time per token, which grows with the batch. One instance in `every`, by order
    of joining, is reserved for requests expected to reach at least `long` times their limit of
    response tokens. A request on one of them counts `weight` times one elsewhere, so that other
    requests come only if the other instances are more crowded. A request without any prediction is
    not long. Because the batches drain anyway, in the replay this costs more than it gains
    (docs/zoo.md); Seer (arXiv 2511.14617) found 0.94-0.99x with true lengths.
    """

    long: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.4
    every: Annotated[int, msgspec.Meta(ge=1)] = 2
    weight: Annotated[float, msgspec.Meta(ge=1)] = 2.0
    weighs_tokens = False

    def load(self, instance: Instance) -> float:
        return len(instance.attempts) * (self.weight if self._for_long(instance) else 1.0)

    def choose(self, request: Request, fleet: FleetView) -> Instance | None:
        if self._is_long(request):
            kept = [instance for instance in fleet.open if self._for_long(instance)]
            if kept:
                return min(kept, key=lambda instance: (instance.in_flight, instance.serial))
        return fleet.least()

    def _for_long(self, instance: Instance) -> bool:
        return instance.serial % self.every == 0

    def _is_long(self, request: Request) -> bool:
        of = request.siblings
        before = of.history.ascending if of.history is not None else of.expected_tokens
        known = of.estimate is not None or before
        return bool(known) and request.expected_tokens >= self.long * of.max_tokens


class VllmInternalLb(Routing, msgspec.Struct, frozen=True):
    """vLLM's internal load balancing: the least of 4 x waiting + running, as last reported.

    The counts are as old as the last report; each request sent since then counts as a waiting one
    (vllm/v1/engine/core_client.py: the coordinator publishes every 100 ms; in a replay it is a
    scenario's `poll_s` is that interval). It sees neither KV nor requests that have finished since.
    """

    weighs_tokens = False

    def load(self, instance: Instance) -> int:
        report = instance.report
        if report is None:
            return 4 * instance.unreported
        return 4 * (report.waiting + instance.unreported) + report.running


class GroupTokens(Routing, msgspec.Struct, frozen=True):
    """The instance with the fewest tokens; the samples of a long prompt go to it together.

    A prompt of `shared_tokens` or more is prefilled and kept once for all its samples if they are
    together. They are split when that instance holds more than the emptiest by `margin` such
    prompts (llm-d's placement of rollout groups; cache_aware routers also fall back to the shortest
    queue).
    """

    shared_tokens: Annotated[int, msgspec.Meta(ge=1)] = 1024
    margin: Positive = 8.0

    def load(self, instance: Instance) -> int:
        return instance.tokens

    def choose(self, request: Request, fleet: FleetView) -> Instance | None:
        least = fleet.least()
        prompt_tokens = request.siblings.prompt_tokens
        if least is None or prompt_tokens < self.shared_tokens:
            return least
        there = _where_siblings_are(request, fleet)
        if there is None or there.tokens - least.tokens > self.margin * prompt_tokens:
            return least
        return there


class SessionAffinity(Routing, msgspec.Struct, frozen=True):
    """The instance that holds the request's KV, unless leaving it is worth the re-prefill.

    A request without KV goes to the instance with the fewest sessions (prime-rl's sticky routing,
    PR 3563), because those between two turns will return. Samples of a prompt of `shared_tokens` or
    more go where the first of them is, because it is prefilled and kept once on it, until that
    instance is ahead by a whole group. A request leaves home only if that is worth the re-prefill
    (`policies.affinity`); it leaves a home that is full or not serving at once. So this routing
    keeps sessions, and affinity is not asked.
    """

    margin: Annotated[int, msgspec.Meta(ge=0)] = MARGIN
    prefill_tokens_per_s: Positive = PREFILL_TOKENS_PER_S
    wait_s: Positive = WAIT_S
    shared_tokens: Annotated[int, msgspec.Meta(ge=1)] = 1024
    weighs_tokens = False
    keeps_sessions = True

    def load(self, instance: Instance) -> int:
        return instance.sessions

    def choose(self, request: Request, fleet: FleetView) -> Instance | None:
        least = fleet.least()
        kv_instance = (
            fleet.open_instance(request.last_instance)
            if request.last_instance is not None
            else None
        )
        if kv_instance is None or least is None:
            return self._with_siblings(request, fleet, least)
        stays = worth_staying(
            request,
            kv_instance,
            least,
            margin=self.margin,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            wait_s=self.wait_s,
        )
        return kv_instance if stays else least

    def _with_siblings(
        self, request: Request, fleet: FleetView, least: Instance | None
    ) -> Instance | None:
        siblings = request.siblings
        if least is None or siblings.prompt_tokens < self.shared_tokens:
            return least
        there = _where_siblings_are(request, fleet)
        if there is None or there.sessions - least.sessions >= len(siblings.requests):
            return least
        return there


def _where_siblings_are(request: Request, fleet: FleetView) -> Instance | None:
    """An open instance that has processed their prompt."""
    for sibling in request.siblings.requests:
        if sibling.last_instance is not None:
            instance = fleet.open_instance(sibling.last_instance)
            if instance is not None:
                return instance
    return None
