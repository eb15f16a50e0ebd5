"""The state of a weight update that a trainer makes with calls to the gateway, as to one server.

A weight update is a single call, or a begin, loads and a finish (vLLM's four calls, SkyRL's
methods). Between its first call and the last one that succeeds on every instance, the weights are
half loaded, and no new requests may be sent to the instances:

    SETTLED --whole--> SETTLED, loaded            prime-rl, AReaL, reload_weights, adapters
    SETTLED --begin--> BEGUN --load--> BEGUN --finish--> SETTLED, loaded

An update of a speculative decoder's draft model begins by a call of its own and goes on by the same
ones: the policy's weights stay what they are, so its finish makes no version.

A call that failed on some instances is *half done*: a retry goes only to those, and then the call
counts as done everywhere. Until then no other load is accepted, and a finish does not complete the
weights. Two calls lead out of this: a new begin, or a whole update after the begun one is finished.

A call that failed on some is remembered by its whole body, with the instances that did it, so
sending it again is safe, and no call can be done twice on one instance and never on another. The
instances that had joined when an update began take part in it: one that joins or restarts in the
middle has nothing half loaded, and would refuse a load that it has not begun.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import StrEnum

import msgspec

from rollout_sched.core.errors import CallerError


class Conflict(CallerError):
    """A valid call that is not possible in the current state."""


class ProtocolStep(StrEnum):
    """What a call does to the weights."""

    SET_UP = "set up"  # set up a transfer: no weights are changed
    BEGIN = "begin"
    DRAFT = "begin draft"
    LOAD = "load"
    FINISH = "finish"
    WHOLE = "whole"  # all three in one
    LABEL = "label"  # name the version of the present weights
    BY_METHOD = "by method"  # depends on the worker's method that the call names


class UpdateState(StrEnum):
    """The state of the fleet's weights, as far as the trainer loads them through the gateway."""

    SETTLED = "settled"
    BEGUN = "begun"


class ProtocolMove(msgspec.Struct, frozen=True):
    """`loaded`: after this move the weights are new and complete."""

    to: UpdateState
    loaded: bool = False


SETTLED, BEGUN = UpdateState

#: The steps that begin an update, whatever was begun before.
BEGINS = (ProtocolStep.BEGIN, ProtocolStep.DRAFT)

MOVES: dict[UpdateState, dict[ProtocolStep, ProtocolMove]] = {
    SETTLED: {
        ProtocolStep.BEGIN: ProtocolMove(BEGUN),
        ProtocolStep.DRAFT: ProtocolMove(BEGUN),
        # prime-rl's /update_weights; vLLM refuses a load before a begin.
        ProtocolStep.LOAD: ProtocolMove(SETTLED, loaded=True),
        ProtocolStep.WHOLE: ProtocolMove(SETTLED, loaded=True),
        ProtocolStep.FINISH: ProtocolMove(SETTLED),
    },
    BEGUN: {
        ProtocolStep.BEGIN: ProtocolMove(BEGUN),
        ProtocolStep.DRAFT: ProtocolMove(BEGUN),
        ProtocolStep.LOAD: ProtocolMove(BEGUN),
        ProtocolStep.FINISH: ProtocolMove(SETTLED, loaded=True),
    },
}


class Member(msgspec.Struct, frozen=True):
    """An instance from one start to the next."""

    name: str
    started_at: float


class PartialUpdate(msgspec.Struct, frozen=True):
    """A call that some instances did and others did not."""

    call: bytes
    what: str
    done: frozenset[Member]
    failed: frozenset[Member]

    def without(self, name: str) -> PartialUpdate:
        """The partial update without the instance of this name."""
        done = frozenset(member for member in self.done if member.name != name)
        failed = frozenset(member for member in self.failed if member.name != name)
        return PartialUpdate(self.call, self.what, done, failed)

    @property
    def remedy(self) -> str:
        failed = sorted(member.name for member in self.failed) or ["instances that are gone"]
        return (
            f"{self.what} has failed on {', '.join(failed)}, so weights are half loaded: send it "
            "again (it goes only to instances that have not done it), begin the update again, or "
            "restart or remove those instances and send it again"
        )


class WeightProtocol:
    """The table and the current update. `call` is a call's identity, which includes its body.

    half_done   the last call, if only some instances have done it
    """

    def __init__(self) -> None:
        self.state: UpdateState = SETTLED
        self.half_done: PartialUpdate | None = None
        self._draft = False
        self._begun_with: frozenset[Member] = frozenset()

    @property
    def half_loaded(self) -> bool:
        """Whether an instance may have weights that are neither the old ones nor the new ones."""
        return self.state is BEGUN or self.half_done is not None

    def members(self, here: Collection[Member], step: ProtocolStep) -> list[Member]:
        """The instances that a step concerns: an instance that came after an update had begun takes
        no part in it."""
        anew = self.state is SETTLED or step in BEGINS
        return [member for member in here if anew or member in self._begun_with]

    def pending(self, call: bytes, members: Iterable[Member]) -> list[Member]:
        """The members that have not done the call yet."""
        half = self.half_done
        done = half.done if half is not None and half.call == call else frozenset()
        return [member for member in members if member not in done]

    def check(self, step: ProtocolStep, call: bytes) -> None:
        """Raises Conflict for a further load while a load is half done, for another update within
        one, or for a draft model's while the policy's weights are half loaded."""
        if step not in MOVES[self.state]:
            raise Conflict("an update has begun: finish it first, or begin it again")
        half = self.half_done
        if half is None or half.call == call:
            return
        of_a_draft = self._draft and self.state is BEGUN
        goes_on = step is ProtocolStep.LOAD and self.state is BEGUN
        if goes_on or (step is ProtocolStep.DRAFT and not of_a_draft):
            raise Conflict(half.remedy)

    def did(self, step: ProtocolStep, call: bytes, members: Collection[Member]) -> bool:
        """All `members` have done it. Returns whether the weights are now new and complete."""
        half, move = self.half_done, MOVES[self.state][step]
        self.state = move.to
        self._begun_with = frozenset(members)
        if step in BEGINS:
            self._draft = step is ProtocolStep.DRAFT
        if step is ProtocolStep.FINISH and half is not None and half.call != call:
            return False
        self.half_done = None
        return move.loaded and not (self._draft and step is ProtocolStep.FINISH)

    def lost(self, name: str) -> None:
        """An instance is lost with its weights. After the last instance that had begun the update,
        or that is named in a half-done call, nothing is half loaded any more."""
        self._begun_with = frozenset(each for each in self._begun_with if each.name != name)
        if self.state is BEGUN and not self._begun_with:
            self.state = SETTLED
        if self.half_done is not None:
            half = self.half_done.without(name)
            self.half_done = half if half.done or half.failed else None

    def half_did(self, step: ProtocolStep, call: PartialUpdate) -> None:
        """Some instances have done a call and others have not."""
        half = self.half_done
        if step is ProtocolStep.FINISH and half is not None and half.call != call.call:
            return  # weights that lack a load stay incomplete, even if some have finished
        if step in BEGINS:  # the update has begun on some
            self.state = BEGUN
            self._draft = step is ProtocolStep.DRAFT
            self._begun_with = call.done | call.failed
        self.half_done = call
