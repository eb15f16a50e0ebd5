"""The names and the encoding of a run's facts in its store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeVar

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.actions import Deliver
from rollout_sched.core.model.records import Serial
from rollout_sched.live.requests.token_payload import Piece, TokenTranscript
from rollout_sched.live.trainer.samples import Prompt
from rollout_sched.store import PieceDamaged, Store
from rollout_sched.store.transaction import HEAD, Tokens, Transaction, counts, decode, encode

#: Kinds of facts.
RUN = "run"
GROUP = "group"
LENGTHS = "lengths"
RECENT = "recent"
PROMPT = "prompt"
DELIVERED = "delivered"
LEASE = "lease"
LOST = "failed"
ACKNOWLEDGED = "acknowledged"
LAST_REPORT = "last_report"
REWARD = "reward"
WEIGHTS = "weights"
PAUSED = "paused"
MODEL = "model"
NAME = "name"

#: The name of the fact of kinds that have only one.
ONE = ""

_PROMPT_OWNER = "p:"

_T = TypeVar("_T")

_ENCODER = msgspec.msgpack.Encoder()


class StoredPrompt(msgspec.Struct, frozen=True):
    """A prompt, whose tokens are stored as a separate piece. `tool`: whether it had a tool, of
    which only the name is stored, "" without a name; `judged`: its samples get rewards."""

    prompt: Prompt
    tool: bool
    tool_name: str = ""
    judged: bool = False


class StoredLoss(msgspec.Struct, frozen=True):
    """`reason`: why a group can never be complete; None: it was filtered. `batch`: the batch that
    reported it to the trainer; None: not yet. `digest`: as in LostGroup."""

    reason: str | None
    batch: Serial | None = None
    digest: int | None = None


def encoded(fact: Any) -> bytes:
    return _ENCODER.encode(fact)


def decoded(data: bytes, kind: type[_T]) -> _T:
    """Raises msgspec.DecodeError."""
    return msgspec.msgpack.decode(data, type=kind)


def encoded_prompt(
    prompt: Prompt, *, tool: str | None, judged: bool = False
) -> tuple[bytes, bytes]:
    """The fact, and its tokens. `tool`: the tool's name, "" without a name; None: no tool.
    `judged`: its samples get rewards. Raises CallerError for a prompt that cannot be stored."""
    # One token stands for all of them: a prompt must have at least one.
    short = msgspec.structs.replace(prompt, prompt_ids=prompt.prompt_ids[:1])
    fact = StoredPrompt(short, tool is not None, tool or "", judged)
    try:
        return encoded(fact), encode(Tokens(prompt.prompt_ids))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CallerError(
            f"group {prompt.uid!a}: it cannot be stored ({error}); `extra`, `sampling` and `each` "
            "may hold text, numbers of 64 bits, booleans, None, lists and dicts"
        ) from error


def prompt_owner(uid: str) -> str:
    return f"{_PROMPT_OWNER}{uid}"


def uid_of_owner(owner: str) -> str | None:
    """The uid in a `prompt_owner`; None for other owners of tokens."""
    return owner.removeprefix(_PROMPT_OWNER) if owner.startswith(_PROMPT_OWNER) else None


def delivery_name(action: Deliver) -> str:
    return f"{action.batch}.{action.part}"


def loss_name(uid: str, batch: int | None) -> str:
    """The name has the batch: a group that was submitted again may be lost again, while a batch
    still reports the earlier loss."""
    return f"{'' if batch is None else batch}:{uid}"


def lost_group(name: str) -> str:
    """The uid in a `loss_name`."""
    return name.partition(":")[2]


# ------------------------------------------------------------------------------------------
# Transcripts in a store: writes the new tokens of each once, and removes dropped ones.

#: Most portions of an attempt; a piece's ordinal is its attempt times this, plus the portion, so
#: that pieces are read in order.
_PORTIONS: Final = 2**24

T = TypeVar("T")


class _Held:
    """What the store holds of one attempt: portions, tokens, and whether a tool has answered."""

    __slots__ = ("answered", "portions", "tokens")

    def __init__(self) -> None:
        self.portions = 0
        self.tokens = 0
        self.answered = False


class StoredTranscripts:
    """Transcripts by request; the tokens are in the store under the request's name.

    New and stored tokens are compared only by attempt and length: an attempt's tokens are appended
    to, or cut at the end, but never changed.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._held: dict[str, dict[int, _Held]] = {}

    def owners(self) -> set[str]:
        """The names of all transcripts in the store."""
        return {_owner(request) for request in self._held}

    def write(
        self,
        request: str,
        transcript: TokenTranscript,
        changes: Transaction,
        streamed: Iterable[tuple[int, Piece]] = (),
    ) -> None:
        """Write the tokens that are new since the last write. `streamed`: tokens of the running
        attempt that the scheduler knows of."""
        wanted = [*transcript.pieces, *streamed]
        held = self._held.get(request)
        if held is None:
            held = self._held[request] = {}
        else:
            for attempt in held.keys() - {attempt for attempt, _ in wanted}:
                _take_back(request, attempt, held.pop(attempt), changes)
        for attempt, piece in wanted:
            _write_piece(request, attempt, piece, held, changes)

    def forget(self, request: str, changes: Transaction) -> None:
        """Remove the whole transcript."""
        if self._held.pop(request, None) is not None:
            changes.clear(_owner(request))

    def restore(self, request: str) -> tuple[int, int]:
        """Read the index of a request of an earlier epoch. Returns the numbers of generated and of
        observed tokens. Raises PieceDamaged."""
        held = self._held.setdefault(request, {})
        generated = observed = gaps = 0
        for ordinal, head in self._store.heads(_owner(request), HEAD).items():
            attempt, portion = divmod(ordinal, _PORTIONS)
            made, returned, answered = counts(head)
            found = held.setdefault(attempt, _Held())
            gaps += portion != found.portions
            found.portions += 1
            found.tokens += made
            found.answered |= answered
            generated += made
            observed += returned
        if (
            gaps or _owner(request) in self._store.losses.owners
        ):  # counts do not cover observed tokens
            raise PieceDamaged(f"tokens of {request!r} are lost")
        return generated, observed

    def read(self, request: str, transcript: TokenTranscript) -> None:
        """Read the stored tokens into a new transcript. Raises PieceDamaged."""
        pieces: dict[int, Piece] = {}
        held = self._held.get(request, {})
        for ordinal, data in self._store.pieces(_owner(request)).items():
            attempt = ordinal // _PORTIONS
            if attempt in held:  # else it was dropped, and its removal is not written yet
                _join(pieces.setdefault(attempt, Piece([], [])), decode(data))
        transcript.restore(pieces)


def _write_piece(
    request: str, attempt: int, piece: Piece, held: dict[int, _Held], changes: Transaction
) -> None:
    """Write the part of a piece that the store does not have yet."""
    known = held.get(attempt)
    if known is not None and known.tokens > len(piece.token_ids):
        _take_back(request, attempt, known, changes)
        known = None
    if known is None:
        known = held[attempt] = _Held()
    new = _from(piece.token_ids, known.tokens)
    answered = piece.observed is not None and not known.answered
    if not new and not answered:
        return
    logprobs = None if piece.logprobs is None else _from(piece.logprobs, known.tokens)
    tokens = Tokens(new, logprobs, piece.observed if answered else None)
    changes.append(_owner(request), attempt * _PORTIONS + known.portions, tokens)
    known.portions += 1
    known.tokens += len(new)
    known.answered |= answered


def _from(values: list[T], start: int) -> list[T]:
    """The values from `start` on; all of them need no copy, because kept pieces never change."""
    return values[start:] if start else values


def _take_back(request: str, attempt: int, known: _Held, changes: Transaction) -> None:
    for portion in range(known.portions):
        changes.take_back(_owner(request), attempt * _PORTIONS + portion)


def _join(piece: Piece, tokens: Tokens) -> None:
    piece.token_ids += tokens.ids
    if tokens.logprobs is not None and piece.logprobs is not None:
        piece.logprobs += tokens.logprobs
    elif tokens.ids:
        piece.logprobs = None
    if tokens.observed is not None:
        piece.observed = list(tokens.observed)


def _owner(request: str) -> str:
    return f"r:{request}"
