"""Roles: the questions the scheduler asks, one each. A policy is an object that answers one.

Answers are data. A role never changes what it is shown, keeps no clock and rolls no dice of its
own; where chance is wanted, a seeded `Dice` is handed in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from rollout_sched.core.events import InstanceReported
from rollout_sched.core.model import Attempt, Group, Instance, Request, Siblings
from rollout_sched.core.rounds import DeliveredGroup, Launch


class Dice(Protocol):
    """The part of `random.Random` that policies may use."""

    def randrange(self, stop: int, /) -> int: ...


class FleetView(Protocol):
    """The instances that may take a request now ("open"), ordered by the routing's load."""

    @property
    def instances(self) -> Mapping[str, Instance]:
        """All that are here, open or not, by name, in the order of their joining."""

    @property
    def open(self) -> Sequence[Instance]:
        """Open instances, in no meaningful but in a reproducible order."""

    def least(self) -> Instance | None:
        """The open instance of least load; the one that joined first among equals."""

    def open_instance(self, instance: str) -> Instance | None:
        """That instance if it is open."""


class Capacity(msgspec.Struct, frozen=True):
    """What the instances that are here hold together; `kv_tokens` in tokens of KV cache."""

    instances: int
    slots: int
    kv_tokens: int


class Progress(Protocol):
    """How far the run is, in groups (prompts), batches and versions.

    A group is *fresh* until first launched, then *active*, *spent* (it used up this round's budget
    of tokens), *deferred* (set back to a later round), *judging* (whole, and waits to be judged) or
    *complete*; *delivered* in the end.
    `started` counts the groups, neither fresh nor delivered, that staleness applies to. Of the
    present batch `in_batch` have gone to the trainer, who takes parts of it, and `missing` have
    not; that is fewer than fill a batch where no more will come. `on_the_way` are the active, those
    that are judged, the complete, and those of the present batch that have gone. `lost` counts the
    groups that the round has lost, failed, filtered or started over, and that no launch has made up
    for yet. `places` is how many groups the trainer
    still takes at its version, if it takes one batch at it. `round` is the launch in effect since
    the last batch was whole. `updating` counts the instances that are getting weights. `recent` are
    the groups of the last 12 batches, kept only for a batching with an attribute `uses_recent` that
    is true.
    """

    @property
    def prompts_per_step(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def fleet_version(self) -> int: ...
    @property
    def trainer_waiting(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    @property
    def fresh(self) -> int: ...
    @property
    def deferred(self) -> int: ...
    @property
    def active(self) -> int: ...
    @property
    def spent(self) -> int: ...
    @property
    def complete(self) -> int: ...
    @property
    def delivered(self) -> int: ...
    @property
    def in_batch(self) -> int: ...
    @property
    def missing(self) -> int: ...
    @property
    def places(self) -> int: ...
    @property
    def on_the_way(self) -> int: ...
    @property
    def lost(self) -> int: ...
    @property
    def started(self) -> int: ...
    @property
    def round(self) -> Launch | None: ...
    @property
    def update_pending(self) -> bool: ...
    @property
    def updating(self) -> int: ...
    @property
    def recent(self) -> Sequence[DeliveredGroup]: ...
    @property
    def capacity(self) -> Capacity: ...


class Routing(Protocol):
    """Which instance takes this request?"""

    def load(self, instance: Instance) -> Any:
        """A sortable load; `FleetView.least` finds its minimum."""

    def choose(self, request: Request, fleet: FleetView) -> Instance | None:
        """An open instance, or None to let it wait."""


class Affinity(Protocol):
    """Does a request of a session go back to where its KV is, though others have less to do?

    A *session* here is the conversation of direct requests that clients name. A routing that sees
    to that itself says so in an attribute `keeps_sessions` that is true; then nobody else is asked.
    """

    @property
    def keeps_sessions(self) -> bool:
        """False: never asked."""

    def stays(self, request: Request, home: Instance, elsewhere: Instance) -> bool:
        """Both are open: where its session was last, and where the routing would send it."""


class Ordering(Protocol):
    """Which waiting request goes first?"""

    def key(self, request: Request) -> Any:
        """A sortable key, least first; equal keys go in order of launch."""


class Admission(Protocol):
    """May this instance take one more request, as far as its own load goes?"""

    def admits(self, instance: Instance) -> bool: ...


class SessionAdmission(Admission, Protocol):
    """An admission that also bounds whose KV an instance keeps from one turn to the next.

    A *session* of an instance is a request in flight there, or between two turns of which the last
    was made there. Where an admission answers these, requests that go on where their KV is pass
    before all others.
    """

    def observe(self, instance: Instance, report: InstanceReported) -> Any:
        """What it makes of a poll; `instance.report` and `instance.observed` are still those of the
        poll before. The scheduler keeps the answer as `instance.observed`."""

    def begins(self, instance: Instance) -> bool:
        """May it take a request whose KV is not there? True of an instance without sessions."""

    def continues(self, instance: Instance) -> bool:
        """May a request whose KV is there go on? If not, it waits with those that have none."""


class Prediction(Protocol):
    """How many response tokens will this request have made in the end?"""

    def estimate(self, siblings: Siblings) -> int | None:
        """What is known of the lengths of siblings; asked whenever one of them makes progress.

        The scheduler keeps the answer as `siblings.estimate` and asks `expect` anew, for every one
        that is not finished, when it changes. None: nothing.
        """

    def expect(self, request: Request) -> int: ...


class Batching(Protocol):
    """When do groups start, and when is a batch ready?

    One that makes every sample some versions old says so in a class attribute `least_staleness`, so
    that a tighter bound is refused before a run.
    """

    @property
    def stops_at_delivery(self) -> bool:
        """True if a whole batch ends the round: what still runs is set back."""

    @property
    def part_prompts(self) -> int:
        """The least groups of a part of a batch, but for the last one; 0 for no parts."""

    def launch(self, progress: Progress) -> Launch | None: ...

    def batch(self, progress: Progress) -> int:
        """Complete groups to deliver now, 0 for not yet. Asked only while the trainer waits.

        Fewer than `progress.missing` are a part, which goes if the trainer takes parts.
        """


class Selection(Protocol):
    """Which fresh groups start together?"""

    @property
    def window(self) -> int:
        """It chooses among the groups of so many rounds, all of which start before the next ones
        are looked at. 0: they start in the order they came, and it is not asked.
        """

    def choose(
        self, window: Sequence[Group], wanted: int, beside: Sequence[Group]
    ) -> Sequence[Group]:
        """So many of `window`, which holds more, in the order they came; `beside` start with them.

        What groups carry: `group.siblings.history`, `.expected_tokens`, `.prompt_tokens` and
        `.max_tokens`.
        """


class Freshness(Protocol):
    """How old may a delivered sample be, and who waits for whom?"""

    def room(self, progress: Progress) -> int:
        """How many more groups may be launched."""

    def oldest_allowed(self, version: int) -> int:
        """The oldest version a sample delivered at trainer version `version` may hold."""

    def must_wait(self, progress: Progress, remaining: Mapping[int, int], places: int) -> bool:
        """True if delivering now would leave groups behind that can no longer be fresh enough.

        `remaining`: oldest version -> groups that would still be open after this delivery;
        `places`: how many groups the present batch would lack after it.
        """


class Interruption(Protocol):
    """What happens to a running request when its instance gets weights, or its round ends?

    One whose requests are verified before they go on says so in an attribute `verifies`, with the
    `leniency` of the test (see `core.verification`); it keeps what is partial, and no KV.
    """

    @property
    def keeps_partial(self) -> bool:
        """True if an interrupted request goes on from its tokens, False if it starts over."""

    @property
    def keeps_kv(self) -> bool:
        """True if it goes on from KV made by older weights, False if KV is recomputed."""

    @property
    def at_update(self) -> Literal["drain", "in_place", "resubmit"]:
        """Finish first, freeze in place, or come back to be dispatched anew."""

    @property
    def budgeted(self) -> bool:
        """True if a request that used up its limit waits for the next round, where the batching
        works in rounds; False if it goes back to the waiting queue at once."""

    def limit(self, request: Request) -> int | None:
        """At most so many new tokens in one attempt; None for no such limit."""


class Weights(Protocol):
    """Which of the instances with old weights start their update now?"""

    def choose(self, outdated: Sequence[Instance], progress: Progress) -> Sequence[Instance]: ...


class Migrant(msgspec.Struct, frozen=True):
    """A running attempt to interrupt, and the open instance its request is to go on on."""

    attempt: Attempt
    instance: Instance


class Migration(Protocol):
    """Which running requests go on elsewhere, and where?

    A migrant keeps its tokens. It costs an interruption, and the prefill of its whole context where
    it goes on. Only what runs can migrate (`Attempt.request` is RUNNING, on an instance that is
    SERVING or DRAINING), and only to an open instance of the same version.
    """

    @property
    def interval_s(self) -> float:
        """Asked so often at most, and only while nothing waits; infinity: never."""

    def choose(self, fleet: FleetView) -> Sequence[Migrant]: ...


class Lending(Protocol):
    """Which instances make way for a trainer on their GPUs, before its batch is whole?

    Their requests go on elsewhere, as migrants do. What was lent comes back with the end of the
    training step.
    """

    @property
    def lends(self) -> bool:
        """False: never asked."""

    def choose(self, fleet: FleetView, progress: Progress) -> Sequence[Instance]:
        """Instances that serve, and not all of them. Asked while nothing waits and no weights are
        on their way, if the trainer that waits shares the instances' GPUs."""


class Roles(msgspec.Struct):
    """One answerer for every question: what a policy file assembles. Only `core.tuning` puts others
    in their places, with other parameters."""

    routing: Routing
    affinity: Affinity
    ordering: Ordering
    admission: Admission
    prediction: Prediction
    batching: Batching
    selection: Selection
    freshness: Freshness
    interruption: Interruption
    weights: Weights
    migration: Migration
    lending: Lending

    @property
    def verifies(self) -> bool:
        """Whether what older weights made is verified before it goes on."""
        return bool(getattr(self.interruption, "verifies", False))

    @property
    def masks(self) -> bool:
        """Whether what is too old is delivered, but not to be trained."""
        return bool(getattr(self.freshness, "masks", False))

    @property
    def carries_over(self) -> bool:
        """Whether a round leaves something behind that could grow stale: not where that starts
        over, or is verified before it goes on."""
        keeps_old = self.interruption.keeps_partial and not self.verifies
        return keeps_old or not self.batching.stops_at_delivery

    @property
    def leniency(self) -> float | None:
        """Of the test by which drafts are verified; None where they are not."""
        return float(getattr(self.interruption, "leniency", 0.0)) if self.verifies else None

    @property
    def uses_history(self) -> bool:
        """True if selection or prediction looks at `Siblings.history`.

        They say so by a class attribute `uses_history = True`; for nobody it is not kept.
        """
        return any(getattr(r, "uses_history", False) for r in (self.selection, self.prediction))

    @property
    def weigh_tokens(self) -> bool:
        """False if neither routing nor admission looks at `Instance.tokens`.

        They say so by a class attribute `weighs_tokens = False`; it spares asking anew for
        running requests each time a prediction changes.
        """
        return any(getattr(r, "weighs_tokens", True) for r in (self.routing, self.admission))

    @property
    def counts_finished(self) -> bool:
        """True if the admission looks at `Instance.finished`; it says so by a class attribute."""
        return bool(getattr(self.admission, "counts_finished", False))

    @property
    def routing_keeps_sessions(self) -> bool:
        """True if the routing sees to sessions, so that affinity is not asked."""
        return bool(getattr(self.routing, "keeps_sessions", False))

    @property
    def keeps_sessions(self) -> bool:
        """Whether it means anything to name a session."""
        return self.routing_keeps_sessions or self.affinity.keeps_sessions

    @property
    def sessions(self) -> SessionAdmission | None:
        """The admission, if it bounds sessions."""
        admission: Any = self.admission
        return admission if hasattr(admission, "begins") else None


__all__ = [
    "Admission",
    "Affinity",
    "Attempt",
    "Batching",
    "Capacity",
    "DeliveredGroup",
    "Dice",
    "FleetView",
    "Freshness",
    "Group",
    "Instance",
    "Interruption",
    "Launch",
    "Lending",
    "Migrant",
    "Migration",
    "Ordering",
    "Prediction",
    "Progress",
    "Request",
    "Roles",
    "Routing",
    "Selection",
    "SessionAdmission",
    "Siblings",
    "Weights",
]
