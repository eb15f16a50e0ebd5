"""Roles: the questions the scheduler asks, one each. A policy is an object that answers one.

Answers are data. A role never changes its arguments, and has no clock and no source of randomness
of its own; a policy that needs randomness is given a seeded `RandomSource`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

import msgspec

from rollout_sched.core.model.events import InstanceReported
from rollout_sched.core.model.model import Attempt, Group, Instance, Request, Siblings
from rollout_sched.core.model.records import DeliveredGroup, Launch


class RandomSource(Protocol):
    """The part of `random.Random` that policies may use."""

    def randrange(self, stop: int, /) -> int: ...


class FleetView(Protocol):
    """The instances that may take a request now ("open"), ordered by the routing's load."""

    @property
    def instances(self) -> Mapping[str, Instance]:
        """All joined instances by name, open or not, in order of joining."""

    @property
    def open(self) -> Sequence[Instance]:
        """The open instances, in a reproducible but otherwise arbitrary order."""

    def least(self) -> Instance | None:
        """The open instance of least load; the one that joined first among equals."""

    def open_instance(self, instance: str) -> Instance | None:
        """The named instance if it is open."""


class Capacity(msgspec.Struct, frozen=True):
    """The sums over all joined instances; `kv_tokens` in tokens of KV cache."""

    instances: int
    slots: int
    kv_tokens: int


class Progress(Protocol):
    """How far the run is, in groups (prompts), batches and versions.

    A group is *fresh* until first launched, then *active*, *spent* (it used up this round's budget
    of tokens), *deferred* (set back to a later round), *judging* (whole, and waits to be judged) or
    *complete*; *delivered* in the end. `started` counts the groups, neither fresh nor delivered,
    that staleness applies to. Of the current batch, `in_batch` groups have gone to the trainer, if
    it takes parts, and `missing` have not; these are fewer than fill a batch if no more groups
    come. `in_progress` is the number of active, judging and complete groups, plus `in_batch`.
    `lost` counts the groups that the round has lost (failed, filtered or started over) and that no
    launch has made up for yet. `open_places` is how many groups the trainer still takes at its
    version, if it takes one batch per version. `round` is the launch in effect since the last batch
    was whole. `updating` counts the instances that are getting weights. `recent` are the groups of
    the last 12 batches, kept only for a batching whose attribute `uses_recent` is true.
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
    def open_places(self) -> int: ...
    @property
    def in_progress(self) -> int: ...
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


# ------------------------------------------------------------------------------------------
# The roles. A policy inherits from its role and answers what is abstract. Attributes with a default
# are what the scheduler must know of the policy itself; a policy for which the default is wrong
# declares the attribute.


class Routing:
    """Which instance takes this request?"""

    __slots__ = ()

    weighs_tokens: ClassVar[bool] = True
    """False if `load` does not read `Instance.tokens`. If no role does, running requests get no
    new prediction each time an estimate changes."""

    keeps_sessions: ClassVar[bool] = False
    """True if it handles sessions itself, so that affinity is not asked."""

    @abstractmethod
    def load(self, instance: Instance) -> Any:
        """A sortable load; `FleetView.least` finds its minimum."""

    def choose(self, request: Request, fleet: FleetView) -> Instance | None:
        """An open instance, by default the one with the least load, or None to let the request
        wait."""
        return fleet.least()


class Affinity:
    """Does a request of a session return to its KV, even if other instances have less to do?

    A *session* is a conversation of direct requests, as named by the client.
    """

    __slots__ = ()

    keeps_sessions: ClassVar[bool] = True
    """False: the role is never asked."""

    @abstractmethod
    def stays(self, request: Request, kv_instance: Instance, elsewhere: Instance) -> bool:
        """`kv_instance` is the session's last instance, `elsewhere` the routing's choice; both
        open."""


class Ordering:
    """Which waiting request goes first?"""

    __slots__ = ()

    @abstractmethod
    def key(self, request: Request) -> Any:
        """A sortable key, lowest first; equal keys go in order of launch."""


class Admission:
    """May this instance take one more request, given its own load?"""

    __slots__ = ()

    weighs_tokens: ClassVar[bool] = True
    """False if it does not read `Instance.tokens`, as for a routing."""

    counts_finished: ClassVar[bool] = False
    """True if it reads `Instance.finished`, which is not counted otherwise."""

    @abstractmethod
    def admits(self, instance: Instance) -> bool: ...


class SessionAdmission(Admission):
    """An admission that also bounds the sessions whose KV an instance keeps between turns.

    A *session* of an instance is a request in flight on it, or one between two turns whose last
    turn it made. With such an admission, requests that go on where their KV is pass before all
    others.
    """

    __slots__ = ()

    @abstractmethod
    def observe(self, instance: Instance, report: InstanceReported) -> Any:
        """A summary of a poll, which the scheduler keeps as `instance.observed`. When asked,
        `instance.report` and `instance.observed` are still those of the poll before."""

    @abstractmethod
    def begins(self, instance: Instance) -> bool:
        """May it take a request whose KV is elsewhere? True for an instance without sessions."""

    @abstractmethod
    def continues(self, instance: Instance) -> bool:
        """May a request whose KV the instance has go on? If not, it waits with those that have no
        KV."""


class Prediction:
    """How many response tokens will this request have in the end?"""

    __slots__ = ()

    uses_history: ClassVar[bool] = False
    """True if it reads `Siblings.history`, which is not kept otherwise."""

    @abstractmethod
    def estimate(self, siblings: Siblings) -> int | None:
        """An estimate from the lengths of siblings; asked whenever one of them makes progress.

        The scheduler keeps the answer as `siblings.estimate`. When it changes, the scheduler asks
        `expect` again for every unfinished sibling. None: no estimate.
        """

    @abstractmethod
    def expect(self, request: Request) -> int: ...


class Batching:
    """When do groups start, and when is a batch ready?"""

    __slots__ = ()

    @property
    def part_prompts(self) -> int:
        """The least groups in a part of a batch, except the last part; 0: no parts."""
        return 0

    @property
    def least_staleness(self) -> int:
        """How many versions old it makes every sample, so that a tighter bound is refused before a
        run."""
        return 0

    @property
    def uses_recent(self) -> bool:
        """True if it reads `Progress.recent`, which is not kept otherwise."""
        return False

    @property
    @abstractmethod
    def stops_at_delivery(self) -> bool:
        """True if a whole batch ends the round and what still runs is set back."""

    @abstractmethod
    def launch(self, progress: Progress) -> Launch | None: ...

    @abstractmethod
    def batch(self, progress: Progress) -> int:
        """Complete groups to deliver now, 0 for not yet. Asked only while the trainer waits.

        Fewer than `progress.missing` groups are a part, delivered if the trainer takes parts.
        """

    def window(self, progress: Progress) -> int:
        """Of the complete groups only those may go that started less than so many starts after the
        oldest group that is not complete. 0: any may go."""
        return 0


class Selection:
    """Which fresh groups start together?"""

    __slots__ = ()

    uses_history: ClassVar[bool] = False
    """True if it reads `Siblings.history`, which is not kept otherwise."""

    @property
    @abstractmethod
    def window(self) -> int:
        """Number of rounds whose groups it chooses from; all of these start before the next window
        is looked at. 0: groups start in order of arrival, and the role is not asked.
        """

    @abstractmethod
    def choose(
        self, window: Sequence[Group], wanted: int, beside: Sequence[Group]
    ) -> Sequence[Group]:
        """Choose `wanted` groups of `window`, which has more, in order of arrival; `beside` start
        with them.

        Useful data of a group: `group.siblings.history`, `.expected_tokens`, `.prompt_tokens` and
        `.max_tokens`.
        """


class Freshness:
    """How old may a delivered sample be, and which groups wait for others?"""

    __slots__ = ()

    @property
    def masks(self) -> bool:
        """True if tokens that are too old are delivered, but not trained."""
        return False

    @abstractmethod
    def room(self, progress: Progress) -> int:
        """How many more groups may be launched."""

    @abstractmethod
    def oldest_allowed(self, version: int) -> int:
        """The oldest version a sample delivered at trainer version `version` may hold."""

    @abstractmethod
    def must_wait(self, progress: Progress, remaining: Mapping[int, int], places: int) -> bool:
        """True if delivering now would leave groups behind that would then become too old.

        `remaining`: oldest version -> groups that would still be open after this delivery;
        `open_places`: how many groups the current batch would lack after it.
        """


class Interruption:
    """What happens to a running request when its instance gets weights, or its round ends?"""

    __slots__ = ()

    @property
    def budgeted(self) -> bool:
        """If a request used up its limit: True if it waits for the next round, where the batching
        works in rounds; False if it returns to the waiting queue at once."""
        return False

    @property
    @abstractmethod
    def keeps_partial(self) -> bool:
        """True if an interrupted request goes on from its tokens, False if it starts over."""

    @property
    @abstractmethod
    def keeps_kv(self) -> bool:
        """True if it goes on from KV made by older weights, False if KV is recomputed."""

    @property
    @abstractmethod
    def at_update(self) -> Literal["drain", "in_place", "resubmit"]:
        """Finish first, freeze in place, or return to be dispatched again."""

    @property
    def unresumable(self) -> Literal["finish", "start_over"]:
        """With "resubmit": whether an update waits for responses that cannot be resumed
        (`Request.resumable`), or lets them start over."""
        return "finish"

    @abstractmethod
    def limit(self, request: Request) -> int | None:
        """The largest number of new tokens in one attempt; None for no limit."""


class Weights:
    """Which instances with old weights start their update now?"""

    __slots__ = ()

    @property
    def least_staleness(self) -> int:
        """How many versions it lets the fleet fall behind, which no sample can be fresher than."""
        return self.every - 1

    @property
    def every(self) -> int:
        """How many versions apart its updates are."""
        return 1

    @property
    def reopen(self) -> Literal["together", "alone"]:
        """Whether instances whose updates begin together serve again when the last of them is
        ready, or each when it is ready."""
        return "together"

    @abstractmethod
    def choose(self, outdated: Sequence[Instance], progress: Progress) -> Sequence[Instance]: ...


class Migrant(msgspec.Struct, frozen=True):
    """A running attempt to interrupt, and the open instance where its request is to go on."""

    attempt: Attempt
    instance: Instance


class Migration:
    """Which running requests go on elsewhere, and where?

    A migrant keeps its tokens. It costs an interruption, and a prefill of its whole context on the
    new instance. Only a running request can migrate (`Attempt.request` is RUNNING, on an instance
    that is SERVING or DRAINING), and only to an open instance of the same version.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def interval_s(self) -> float:
        """Least seconds between two calls; asked only while nothing waits. Infinity: never."""

    @abstractmethod
    def choose(self, fleet: FleetView) -> Sequence[Migrant]: ...


class Lending:
    """Which instances make way for a trainer on their GPUs, before its batch is whole?

    Their requests go on elsewhere, as migrants do. A lent instance returns at the end of the
    training step.
    """

    __slots__ = ()

    lends: ClassVar[bool] = True
    """False: the role is never asked."""

    @abstractmethod
    def choose(self, fleet: FleetView, progress: Progress) -> Sequence[Instance]:
        """Serving instances, but not all of them. Asked while nothing waits and no weights are on
        their way, if the trainer waits and shares the instances' GPUs."""


class Roles(msgspec.Struct):
    """One policy for every role, as assembled from a policy file."""

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
    def carries_over(self) -> bool:
        """Whether a round leaves tokens behind that could become stale."""
        return self.interruption.keeps_partial or not self.batching.stops_at_delivery

    @property
    def uses_history(self) -> bool:
        """True if selection or prediction reads `Siblings.history`."""
        return self.selection.uses_history or self.prediction.uses_history

    @property
    def weigh_tokens(self) -> bool:
        """False if neither routing nor admission reads `Instance.tokens`."""
        return self.routing.weighs_tokens or self.admission.weighs_tokens

    @property
    def keeps_sessions(self) -> bool:
        """Whether naming a session has any effect."""
        return self.routing.keeps_sessions or self.affinity.keeps_sessions

    @property
    def sessions(self) -> SessionAdmission | None:
        """The admission, if it bounds sessions."""
        return self.admission if isinstance(self.admission, SessionAdmission) else None


__all__ = [
    "Admission",
    "Affinity",
    "Attempt",
    "Batching",
    "Capacity",
    "DeliveredGroup",
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
    "RandomSource",
    "Request",
    "Roles",
    "Routing",
    "Selection",
    "SessionAdmission",
    "Siblings",
    "Weights",
]
