"""Payloads of token ids: what is sent to an instance for each attempt.

The core only counts tokens; the tokens are in the payload's transcript, so a resumed request sends
prompt and transcript.

A transcript has one piece for each attempt, and the pieces joined are exactly what the core counts.
Tokens beyond an attempt's limit are cut, and those of an abandoned attempt are dropped by the
Discard that names it, so no token can come twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.model import DeliveredSample
from rollout_sched.live.ports import (
    AnswerUntrue,
    Attempting,
    InstanceClient,
    OnTokens,
    Order,
    Outcome,
    Output,
    Over,
    Responder,
)
from rollout_sched.live.requests import continuation
from rollout_sched.live.requests.attempt import AttemptTask
from rollout_sched.live.requests.continuation import StopStrings

# ------------------------------------------------------------------------------------------
# Pieces of a response, one for each attempt, and their view as one response.


class Piece(msgspec.Struct):
    """Tokens of one attempt, with their log-probabilities if they were requested.

    `observed`: the tokens that a tool returned for the turn that the attempt ended.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    observed: list[int] | None = None


class JoinedPieces:
    """The pieces in order: generated tokens, and between two turns of a trajectory the tokens that
    its tool returned."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: Mapping[int, Piece]) -> None:
        self._pieces = pieces

    @property
    def token_ids(self) -> list[int]:
        """Generated and observed."""
        ids: list[int] = []
        for piece in self._pieces.values():
            ids += piece.token_ids
            ids += piece.observed or ()
        return ids

    @property
    def logprobs(self) -> list[float]:
        """One for each of `token_ids`, if requested; 0.0 for observed tokens."""
        values: list[float] = []
        for piece in self._pieces.values():
            values += piece.logprobs or ()
            values += [0.0] * len(piece.observed or ())
        return values

    @property
    def mask(self) -> list[int]:
        """1 for each generated token of `token_ids`, 0 for each observed one."""
        mask: list[int] = []
        for piece in self._pieces.values():
            mask += [1] * len(piece.token_ids)
            mask += [0] * len(piece.observed or ())
        return mask

    @property
    def turns(self) -> int:
        """Number of turns that a tool has answered."""
        return sum(piece.observed is not None for piece in self._pieces.values())

    @property
    def turn_ids(self) -> list[int]:
        """The tokens generated since the last answer of a tool."""
        ids: list[int] = []
        for piece in self._pieces.values():
            ids = [] if piece.observed is not None else ids + piece.token_ids
        return ids

    @property
    def turn_tokens(self) -> int:
        """Number of `turn_ids`."""
        tokens = 0
        for piece in self._pieces.values():
            tokens = 0 if piece.observed is not None else tokens + len(piece.token_ids)
        return tokens


# ------------------------------------------------------------------------------------------
# The transcript of one request: token ids of its attempts, with their log-probabilities.

T = TypeVar("T")


def detached(pieces: Mapping[int, T]) -> dict[int, T]:
    """The pieces in order, under negative numbers, which no attempt has."""
    return {place - len(pieces): piece for place, piece in enumerate(pieces.values())}


class TokenTranscript:
    """A transcript (`live.ports.Transcript`) of token ids. One piece is kept for each attempt."""

    def __init__(self) -> None:
        self._pieces: dict[int, Piece] = {}
        self._streams: dict[int, Piece] = {}

    @property
    def attempts(self) -> int:
        """Number of attempts whose tokens are kept."""
        return len(self._pieces)

    @property
    def joined(self) -> JoinedPieces:
        """The kept pieces as one response."""
        return JoinedPieces(self._pieces)

    @property
    def token_ids(self) -> list[int]:
        """Generated and observed tokens."""
        return self.joined.token_ids

    @property
    def logprobs(self) -> list[float]:
        """One for each of `token_ids`, if requested; 0.0 for observed tokens."""
        return self.joined.logprobs

    @property
    def pieces(self) -> list[tuple[int, Piece]]:
        """The kept pieces by attempt, in order."""
        return list(self._pieces.items())

    def piece(self, attempt: int) -> Piece | None:
        """The kept piece of an attempt."""
        return self._pieces.get(attempt)

    def restore(self, pieces: Mapping[int, Piece]) -> None:
        """Take over the pieces of an earlier transcript of the request."""
        self._pieces.update(pieces)

    def observe(self, attempt: int, token_ids: Sequence[int]) -> None:
        """Append what a tool returned for the turn of this attempt."""
        self._pieces.setdefault(attempt, Piece([], [])).observed = list(token_ids)

    def collect(self, attempt: int) -> OnTokens:
        """Returns a function that appends streamed tokens of an attempt. After the attempt is kept
        or dropped it ignores them: a kept piece is never changed."""
        stream = self._streams.setdefault(attempt, Piece([], []))

        def collect(token_ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
            if self._streams.get(attempt) is not stream:
                return  # the attempt was stopped before its client noticed
            stream.token_ids.extend(token_ids)
            if logprobs is None or stream.logprobs is None:
                stream.logprobs = None
            else:
                stream.logprobs.extend(logprobs)

        return collect

    def streamed(self, attempt: int) -> int:
        stream = self._streams.get(attempt)
        return 0 if stream is None else len(stream.token_ids)

    def partial(self, attempt: int, tokens: int) -> Piece:
        return self._streams[attempt]

    def append(self, attempt: int, tokens: int, piece: Piece) -> None:
        if len(piece.token_ids) > tokens:
            logprobs = None if piece.logprobs is None else piece.logprobs[:tokens]
            piece = Piece(piece.token_ids[:tokens], logprobs)
        self._streams.pop(attempt, None)
        if tokens:
            self._pieces[attempt] = piece

    def drop(self, attempt: int) -> None:
        if attempt:
            self._pieces.pop(attempt, None)
            self._streams.pop(attempt, None)
        else:
            self._pieces.clear()

    def detach(self) -> None:
        self._pieces = detached(self._pieces)
        self._streams.clear()


#: How a tokenizer writes a character that has only begun, and the most tokens of one.
_UNFINISHED, _PARTS = "\ufffd", 4


class StopSearch:
    """The cut before an attempt of a response with stop strings, of which one may lie over it.

    before  the text before the cut, as far as such a string may reach; None if `client` cannot tell
    """

    def __init__(self, stops: StopStrings, made: Sequence[int], client: InstanceClient) -> None:
        self.before: str | None = None
        self._stops = stops
        self._least = stops.min_tokens - len(made)
        self._reach = _PARTS * stops.longest  # tokens
        self._earlier = made[max(0, len(made) - self._reach) :]
        self._client = client

    @classmethod
    async def of(
        cls, sampling: Mapping[str, Any], context: Sequence[int], made: int, client: InstanceClient
    ) -> StopSearch | None:
        """None if no stop string can lie over the cut. The last `made` tokens of the context are of
        the response."""
        asked = sampling.get("stop") or []
        strings = [asked] if isinstance(asked, str) else list(asked)
        stops = StopStrings(strings, int(sampling.get("min_tokens") or 0))
        if not made or not stops.longest:
            return None
        search = cls(stops, context[len(context) - made :], client)
        text = await client.detokenize(search._earlier)
        if text is not None and text.endswith(_UNFINISHED):
            # An engine searches for them in its repetition of all that precedes (vLLM 48853).
            whole = await client.detokenize(context)
            if whole is None or any(stop in whole for stop in strings):
                text = None
        search.before = None if text is None else text.rstrip(_UNFINISHED)
        return search

    async def end(self, token_ids: Sequence[int]) -> int | None:
        """The tokens of the attempt up to the one that completes such a string; 0 if it cannot be
        told, None if none does."""
        reach = token_ids[: self._reach]
        ends = await self._ends(reach)
        if not ends:
            return 0 if ends is None else None
        known = 0  # ends before this token
        for count in range(1, len(reach) + 1):
            ends = await self._ends(reach[:count])
            if ends is None:
                return 0
            if len(ends) > known and count > self._least:
                return count
            known = len(ends)
        return None

    async def _ends(self, token_ids: Sequence[int]) -> list[int] | None:
        """Where each stop string over the cut ends, if these tokens follow; None if unknown."""
        text, before = await self._text(token_ids), self.before
        if text is None or before is None or not text.startswith(before):
            return None
        return [end for end, _, _ in self._stops.over_the_cut(before, text[len(before) :])]

    async def _text(self, token_ids: Sequence[int]) -> str | None:
        text = await self._client.detokenize([*self._earlier, *token_ids])
        return None if text is None else text.rstrip(_UNFINISHED)


class DeliveredInGroup:
    """The responder of a request that is delivered, or fails, with its group."""

    def answer(self, sample: DeliveredSample) -> None:
        pass

    def fail(self, reason: str, error: Exception | None) -> None:
        pass


IN_GROUP = DeliveredInGroup()


class TokenPayload:
    """A prompt given as tokens, answered with tokens (token in, token out).

    `sampling`: vLLM's SamplingParams by name, without n and max_tokens; with "logprobs" in it every
    answer must have one log-probability per token. `stream_every`: see `Order`.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        stream_every: int = 0,
        session: str = "",
        responder: Responder = IN_GROUP,
    ) -> None:
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.stream_every = stream_every
        self.session = session
        self.transcript = TokenTranscript()
        self.responder = responder

    @property
    def response_ids(self) -> list[int]:
        return self.transcript.token_ids

    @property
    def logprobs(self) -> list[float] | None:
        """One for each of `response_ids`; None if none were requested."""
        return None if self.sampling.get("logprobs") is None else self.transcript.logprobs

    @property
    def resumable(self) -> bool:
        """Whether a turn that is cut can go on: see `continuation`."""
        return not continuation.hindrance(self.sampling, searched=True)

    def begin(
        self, client: InstanceClient, dispatch: Dispatch, order_id: str, over: Over
    ) -> Attempting:
        return AttemptTask(self.attempt(client, dispatch, order_id), over)

    async def attempt(self, client: InstanceClient, dispatch: Dispatch, order_id: str) -> Outcome:
        limit = dispatch.max_new_tokens
        made = self.transcript.joined.turn_ids
        context = [*self.prompt_ids, *self.response_ids]
        search = await StopSearch.of(self.sampling, context, len(made), client)
        if search is not None and search.before is None:
            return Outcome(0, "abort", (), None, resumable=False)
        # Tokens after a stop string over the cut could not be taken back.
        stream_every = 0 if search else self.stream_every
        order = Order(
            order_id,
            context,
            limit,
            f"v{dispatch.salt}",
            continuation.resumed(self.sampling, len(made), limit),
            stream_every,
            self.session,
        )
        collect = self.transcript.collect(dispatch.attempt) if stream_every else None
        output = await client.generate(order, collect)
        self._check(output)
        piece = Piece(output.token_ids, output.logprobs)
        kept = None if search is None else await search.end(output.token_ids)
        if kept is None:
            return Outcome(len(output.token_ids), output.finish, output.spans, piece)
        finish: Literal["stop", "abort"] = "stop" if kept else "abort"
        spans = continuation.spans_until(output.spans, kept)
        return Outcome(kept, finish, spans, piece, resumable=bool(kept))

    def _check(self, output: Output) -> None:
        if self.sampling.get("logprobs") is None:
            return
        count = -1 if output.logprobs is None else len(output.logprobs)
        if count != len(output.token_ids):
            raise AnswerUntrue(
                f"{len(output.token_ids)} tokens came with {max(0, count)} log-probabilities"
            )
