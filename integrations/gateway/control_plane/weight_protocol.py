"""How far a trainer is that loads weights by calls to the gateway as if that were one server.

A weight update is one call, or begins, loads and finishes (vLLM's four calls, SkyRL's methods).
Between its first call and the last one that succeeds on every instance the weights are half loaded,
and nothing new may be sent there:

    SETTLED --whole--> SETTLED, loaded            prime-rl, AReaL, reload_weights, adapters
    SETTLED --begin--> BEGUN --load--> BEGUN --finish--> SETTLED, loaded

A call that failed on some instances is *half done*: sent again, it goes to those alone, and then
counts as done everywhere. Until then no load leads on, and what is finished is not whole; to begin
anew leads on, or a whole update once what had begun is finished.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import StrEnum

import msgspec

from rollout_sched.core.errors import CallerError


class Conflict(CallerError):
    """A call that is right in itself, but not now."""


class ProtocolStep(StrEnum):
    """What a call does to the weights."""

    SET_UP = "set up"  # of a transfer: no weights are touched
    BEGIN = "begin"
    LOAD = "load"
    FINISH = "finish"
    WHOLE = "whole"  # all three in one
    LABEL = "label"  # what the weights that are there are called
    BY_METHOD = "by method"  # whatever the worker's method is that it calls


class UpdateState(StrEnum):
    """Of the fleet's weights, as far as the trainer loads them through us."""

    SETTLED = "settled"
    BEGUN = "begun"


class ProtocolMove(msgspec.Struct, frozen=True):
    """`loaded`: the weights are new and whole then."""

    to: UpdateState
    loaded: bool = False


SETTLED, BEGUN = UpdateState

MOVES: dict[UpdateState, dict[ProtocolStep, ProtocolMove]] = {
    SETTLED: {
        ProtocolStep.BEGIN: ProtocolMove(BEGUN),
        # prime-rl's /update_weights; vLLM refuses what has not begun.
        ProtocolStep.LOAD: ProtocolMove(SETTLED, loaded=True),
        ProtocolStep.WHOLE: ProtocolMove(SETTLED, loaded=True),
        ProtocolStep.FINISH: ProtocolMove(SETTLED),
    },
    BEGUN: {
        ProtocolStep.BEGIN: ProtocolMove(BEGUN),
        ProtocolStep.LOAD: ProtocolMove(BEGUN),
        ProtocolStep.FINISH: ProtocolMove(SETTLED, loaded=True),
    },
}


class Member(msgspec.Struct, frozen=True):
    """An instance from one start to the next."""

    name: str
    started_at: float


class HalfDone(msgspec.Struct, frozen=True):
    """A call that some instances did and others did not."""

    call: bytes
    what: str
    done: frozenset[Member]
    failed: frozenset[Member]

    def without(self, name: str) -> HalfDone:
        """Where an instance of this name is gone."""
        done = frozenset(member for member in self.done if member.name != name)
        failed = frozenset(member for member in self.failed if member.name != name)
        return HalfDone(self.call, self.what, done, failed)

    @property
    def remedy(self) -> str:
        failed = sorted(member.name for member in self.failed) or ["instances that are gone"]
        return (
            f"{self.what} has failed on {', '.join(failed)}, so the weights are not whole: send it "
            "again, which goes to those alone that have not done it, begin anew, or restart or "
            "remove them and send it again"
        )


class WeightProtocol:
    """The table, and what of it is under way. `call` is a call's identity, body and all.

    half_done   the last call, if it was done by some only
    """

    def __init__(self) -> None:
        self.state: UpdateState = SETTLED
        self.half_done: HalfDone | None = None
        self._begun_with: frozenset[Member] = frozenset()

    @property
    def half_loaded(self) -> bool:
        """Whether an instance may have weights that are neither the old ones nor the new ones."""
        return self.state is BEGUN or self.half_done is not None

    def members(self, here: Collection[Member], step: ProtocolStep) -> list[Member]:
        """Of the instances that are here those that a step concerns: who came after an update had
        begun has no part in it."""
        anew = self.state is SETTLED or step is ProtocolStep.BEGIN
        return [member for member in here if anew or member in self._begun_with]

    def pending(self, call: bytes, members: Iterable[Member]) -> list[Member]:
        """Those that have not done it yet."""
        half = self.half_done
        done = half.done if half is not None and half.call == call else frozenset()
        return [member for member in members if member not in done]

    def check(self, step: ProtocolStep, call: bytes) -> None:
        """Raises Conflict if it would load on where a load is half done, or begin another update
        within one."""
        if step not in MOVES[self.state]:
            raise Conflict("an update has begun: finish it first, or begin it anew")
        half = self.half_done
        goes_on = step is ProtocolStep.LOAD and self.state is BEGUN
        if half is not None and half.call != call and goes_on:
            raise Conflict(half.remedy)

    def did(self, step: ProtocolStep, call: bytes, members: Collection[Member]) -> bool:
        """All `members` have done it. Returns whether the weights are new and whole now."""
        half, move = self.half_done, MOVES[self.state][step]
        self.state = move.to
        self._begun_with = frozenset(members)
        if step is ProtocolStep.FINISH and half is not None and half.call != call:
            return False
        self.half_done = None
        return move.loaded

    def lost(self, name: str) -> None:
        """An instance is gone, and its weights with it. When the last one is that had begun, or of
        those that did the half of a call, nothing is half loaded any more."""
        self._begun_with = frozenset(each for each in self._begun_with if each.name != name)
        if self.state is BEGUN and not self._begun_with:
            self.state = SETTLED
        if self.half_done is not None:
            half = self.half_done.without(name)
            self.half_done = half if half.done or half.failed else None

    def half_did(self, step: ProtocolStep, call: HalfDone) -> None:
        """Some have done a call and others have not."""
        half = self.half_done
        if step is ProtocolStep.FINISH and half is not None and half.call != call.call:
            return  # what is not whole for want of a load stays so, whoever has finished it
        if step is ProtocolStep.BEGIN:  # on the first, it has begun
            self.state = BEGUN
            self._begun_with = call.done | call.failed
        self.half_done = call
