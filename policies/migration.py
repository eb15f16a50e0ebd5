"""Migration: which running requests go on elsewhere, and where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from rollout_sched.core.model.model import InstanceStatus, RequestState
from rollout_sched.core.model.roles import Attempt, FleetView, Instance, Migrant, Migration
from rollout_sched.policies.estimates import WEIGHTS_TOKENS, LoadEstimate, decode_step

Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class NoMigration(Migration, msgspec.Struct, frozen=True):
    """No migration: a request ends on the instance where it was sent."""

    interval_s = float("inf")

    def choose(self, fleet: FleetView) -> Sequence[Migrant]:
        return ()


class ByCost(Migration, msgspec.Struct, frozen=True):
    """From the fullest instances to the emptiest, as long as it saves more than it costs.

    A decode step takes `context_s` longer for each token in the KV cache (the scenario's cost
    constant of that name). Take a migrant with a context of c tokens that has n tokens left to
    make. Over these it saves itself n * context_s times the difference of the two loads less c, and
    each request that it leaves n * context_s * c. Each request that it joins loses as much, and all
    of them wait for its prefill, c / `prefill_tokens_per_s`. It migrates if the savings are
    `margin` times the prefill: fixed thresholds can lose 18-20 % (verl PR 6533). n is the estimate
    from its siblings, else as many tokens as it has made, because the longest so far run longest.

    It must fit: at most `fill` of the target's KV cache may be used. The source is never left with
    less load than the target then has, so that no migrant causes one in the other direction. A
    request migrates at most `most` times.
    """

    context_s: Positive = 3e-8
    prefill_tokens_per_s: Positive = 25_000.0
    margin: Positive = 2.0
    fill: Share = 0.9
    most: AtLeastOne = 2
    interval_s: Positive = 2.0

    def choose(self, fleet: FleetView) -> Sequence[Migrant]:
        return [
            migrant
            for loads in _by_version(fleet)
            for full, empty in _opposites(loads)
            for migrant in self._spread(full, empty)
        ]

    def _spread(self, full: LoadEstimate, empty: LoadEstimate) -> Iterator[Migrant]:
        """The migrants from one instance to the other, the largest gain first."""
        left = [a for a in _movable(full.instance) if a.request.migrations < self.most]
        while left:
            gains = [self._gain(attempt, full, empty) for attempt in left]
            gain = max(gains)
            attempt = left.pop(gains.index(gain))
            context = full.context(attempt)
            if gain <= 0 or not empty.has_room(context, self.fill):
                return
            full.take(context)
            empty.add(context)
            yield Migrant(attempt, empty.instance)

    def _gain(self, attempt: Attempt, full: LoadEstimate, empty: LoadEstimate) -> float:
        """Seconds saved over all requests concerned, minus the gain that is required."""
        context = full.context(attempt)
        itself = full.tokens - empty.tokens - context
        if itself < context:
            return 0.0
        others = (full.requests - 1 - empty.requests) * context
        saved = self.context_s * full.tokens_left(attempt) * (itself + others)
        prefill = context / self.prefill_tokens_per_s * (empty.requests + 1)
        return saved - self.margin * prefill


class Repack(Migration, msgspec.Struct, frozen=True):
    """Empties instances past their plateau onto others, so that they get weights and prompts.

    Laminar (arXiv 2510.12633). An instance is past its plateau when nothing waits for it and its KV
    use has fallen between its last two polls. The emptiest of these are emptied first. Each request
    goes to the fullest instance of its version that has room: at most `fill` of the KV cache, and a
    decode step that takes at most `slowdown` times as long as now, for which Laminar bounds the
    batch (`weights_tokens` tokens of context take as long to read as the weights). Unless all
    requests of an instance find room, none goes. It pays only if the emptied instance gets work.
    """

    fill: Share = 0.8
    slowdown: Annotated[float, msgspec.Meta(ge=1)] = 1.1
    weights_tokens: Positive = WEIGHTS_TOKENS
    most: AtLeastOne = 2
    interval_s: Positive = 5.0

    def choose(self, fleet: FleetView) -> Sequence[Migrant]:
        migrants: list[Migrant] = []
        for loads in _by_version(fleet):
            loads.sort(key=lambda load: load.tokens)
            receivers = [load for load in loads if load.instance.open_index >= 0]
            taken: set[str] = set()  # receivers are not emptied, emptied ones do not receive
            for donor in loads:
                if donor.instance.id in taken or not self._may_be_emptied(donor):
                    continue
                others = [load for load in receivers if load is not donor]
                moved = self._pack(donor, others)
                if moved:
                    migrants += moved
                    receivers = others
                    taken.update(migrant.instance.id for migrant in moved)
        return migrants

    def _may_be_emptied(self, donor: LoadEstimate) -> bool:
        report, before = donor.instance.report, donor.instance.report_before
        if report is None or before is None or report.waiting or not donor.requests:
            return False
        movable = [a for a in _movable(donor.instance) if a.request.migrations < self.most]
        return report.kv_usage < before.kv_usage and len(movable) == donor.requests

    def _pack(self, donor: LoadEstimate, receivers: list[LoadEstimate]) -> list[Migrant]:
        """Targets for all its requests, the largest first; empty if they do not all find room."""
        moved: list[tuple[Attempt, LoadEstimate, float]] = []
        attempts = sorted(_movable(donor.instance), key=donor.context, reverse=True)
        for attempt in attempts:
            context = donor.context(attempt)
            fitting = [r for r in receivers if r.requests and self._has_room(r, context)]
            if not fitting:
                for _, receiver, size in moved:
                    receiver.take(size)
                return []
            fullest = max(fitting, key=lambda load: load.tokens)
            fullest.add(context)
            moved.append((attempt, fullest, context))
        return [Migrant(attempt, receiver.instance) for attempt, receiver, _ in moved]

    def _has_room(self, receiver: LoadEstimate, context: float) -> bool:
        before = decode_step(receiver.found, self.weights_tokens)
        after = decode_step(receiver.tokens + context, self.weights_tokens)
        return after <= self.slowdown * before and receiver.has_room(context, self.fill)


def _by_version(fleet: FleetView) -> list[list[LoadEstimate]]:
    """The loads of serving and draining instances, one list per version."""
    loads: dict[int, list[LoadEstimate]] = {}
    for instance in fleet.instances.values():
        if instance.status in (InstanceStatus.SERVING, InstanceStatus.DRAINING):
            loads.setdefault(instance.version, []).append(LoadEstimate(instance))
    return list(loads.values())


def _opposites(loads: list[LoadEstimate]) -> Iterator[tuple[LoadEstimate, LoadEstimate]]:
    """The fullest with the emptiest open one, then the next two, until their loads meet."""
    loads.sort(key=lambda load: load.tokens)
    open_ones = [load for load in loads if load.instance.open_index >= 0]
    for full, empty in zip(reversed(loads), open_ones, strict=False):
        if full.tokens <= empty.tokens:
            return
        yield full, empty


def _movable(instance: Instance) -> Iterator[Attempt]:
    """The attempts that run and belong to a batch.

    A client's own request stays: its server's work on a whole chat answer would be lost. So does
    one that cannot be resumed.
    """
    for attempt in instance.attempts.values():
        request = attempt.request
        runs = not attempt.abandoned and request.state is RequestState.RUNNING
        if runs and request.group and request.resumable:
            yield attempt
