"""Payloads of token ids: what is sent to an instance for each attempt.

The core only counts tokens; the tokens are in the payload's transcript, so a resumed request sends
prompt and transcript.

A transcript has one piece for each attempt, and the pieces joined are exactly what the core counts.
Tokens beyond an attempt's limit are cut, and those of an abandoned attempt are dropped by the
Discard that names it, so no token can come twice.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

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
    Passed,
    PromptToken,
    Responder,
)
from rollout_sched.live.requests.attempt import AttemptTask

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
    def drawn_logprobs(self) -> list[float]:
        """One for each of `token_ids`, under the weights that drew it, if requested; 0.0 for
        observed tokens."""
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
    def settled(self) -> int:
        """Number of generated tokens that a tool has answered."""
        made = settled = 0
        for piece in self._pieces.values():
            made += len(piece.token_ids)
            settled = settled if piece.observed is None else made
        return settled


# ------------------------------------------------------------------------------------------
# The transcript of one request: token ids of its attempts, with their log-probabilities.

T = TypeVar("T")


def detached(pieces: Mapping[int, T]) -> dict[int, T]:
    """The pieces in order, under negative numbers, which no attempt has."""
    return {place - len(pieces): piece for place, piece in enumerate(pieces.values())}


class TokenTranscript:
    """A transcript (`live.ports.Transcript`) of token ids. One piece is kept for each attempt."""

    def __init__(self) -> None:
        self._verified: list[float] = []  # of the leading generated tokens
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
        """One for each of `token_ids`, under the weights that made or verified it, if requested;
        0.0 for observed tokens."""
        values = self.joined.drawn_logprobs
        if self._verified:
            made = [place for place, generated in enumerate(self.joined.mask) if generated]
            for place, logprob in zip(made, self._verified, strict=False):
                values[place] = logprob
        return values

    @property
    def pieces(self) -> list[tuple[int, Piece]]:
        """The kept pieces by attempt, in order."""
        return list(self._pieces.items())

    def piece(self, attempt: int) -> Piece | None:
        """The kept piece of an attempt."""
        return self._pieces.get(attempt)

    @property
    def verified_logprobs(self) -> list[float]:
        """Of the leading generated tokens that were verified; each verification makes a new
        list."""
        return self._verified

    def restore(self, pieces: Mapping[int, Piece], verified: list[float]) -> None:
        """Take over the pieces of an earlier transcript of the request."""
        self._pieces.update(pieces)
        self._verified = verified

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

    def keep(self, attempt: int, tokens: int, piece: Piece) -> None:
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
            self._verified = []

    def detach(self) -> None:
        self._pieces = detached(self._pieces)
        self._streams.clear()

    def verified(self, logprobs: Sequence[float]) -> None:
        """The leading generated tokens have passed the test: these are their log-probabilities
        under the weights that they now count for."""
        made = sum(len(piece.token_ids) for piece in self._pieces.values())
        self._verified = list(logprobs[:made])

    def cut(self, tokens: int) -> None:
        while tokens and self._pieces:
            attempt, piece = self._pieces.popitem()
            left = len(piece.token_ids) - tokens
            if piece.observed is not None:
                self._pieces.clear()
            elif left > 0:
                logprobs = None if piece.logprobs is None else piece.logprobs[:left]
                self._pieces[attempt] = Piece(piece.token_ids[:left], logprobs)
            tokens = max(0, -left)
        self.verified(self._verified)


# ------------------------------------------------------------------------------------------
# The test of verified resume: which tokens that older weights made may stay.
#
# A token that was drawn with probability p_old is kept with probability min(1, p_new / p_old), the
# test of speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).
# A `leniency` l > 0 multiplies the ratio by e^l, as SPEC-RL (arXiv 2509.23232) does: a kept token
# is then at most e^l times as likely as under the new weights. The response is cut at the first
# token that is not kept, and continues from p_new.
#
# Speculative sampling draws the token at the cut from the residual, max(0, p_new - p_old)
# normalised to sum to one; then all tokens are distributed exactly as p_new. Here the token at the
# cut is drawn from p_new itself: its error is the total variation between p_old and p_new there
# (the probability of the cut) times that between p_new and the residual. No other token has an
# error (`tests/live/requests/test_token_payload.py` computes it). The residual would need the whole
# distribution p_old of every token to be stored.

#: Sampling values allowed when drafts are verified: with others, tokens are not drawn from the
#: distribution that the prompt log-probabilities describe.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
}
_ABSENT = (
    "allowed_token_ids",
    "bad_words",
    "logit_bias",
    "logits_processors",
    "prompt_logprobs",
    "structured_outputs",
    "thinking_token_budget",
)


class DraftTest(msgspec.Struct, frozen=True):
    """The test with its leniency, and a separate random generator for every attempt."""

    leniency: float
    seed: int = 0

    def passed(
        self,
        dispatch: Dispatch,
        old: Sequence[float],
        new: Sequence[PromptToken],
        *,
        greedy: bool = False,
    ) -> int:
        """How many leading tokens stay. `old`: their log-probabilities when they were drawn. A
        greedy token stays if it is still the most likely one."""
        if greedy:
            return next((i for i, token in enumerate(new) if token.rank != 1), len(new))
        dice = random.Random(f"{self.seed}/{dispatch.request}/{dispatch.attempt}")
        for place, (before, now) in enumerate(zip(old, new, strict=True)):
            if dice.random() >= acceptance(before, now.logprob, self.leniency):
                return place
        return len(new)


def acceptance(old: float, new: float, leniency: float = 0.0) -> float:
    """The probability that a token is kept, from its log-probabilities."""
    return math.exp(min(0.0, leniency + new - old))


def is_greedy(sampling: Mapping[str, Any]) -> bool:
    return sampling.get("temperature") == 0


def untestable(sampling: Mapping[str, Any]) -> str:
    """Why a response with this sampling cannot be verified; "" if it can."""
    if sampling.get("stop"):
        return "stop: a stop string may lie across the cut; use stop_token_ids"
    for name in _ABSENT:
        if sampling.get(name):
            return f"{name} changes the sampling distribution; leave it out"
    if is_greedy(sampling):
        neutral: Mapping[str, tuple[Any, ...]] = {
            name: values for name, values in _NEUTRAL.items() if name not in ("top_p", "top_k")
        }
    elif sampling.get("temperature", 1) != 1:
        return "temperature: servers report log-probabilities only at 1; set it to 1 (or 0)"
    else:
        neutral = _NEUTRAL
    for name, values in neutral.items():
        if name in sampling and sampling[name] is not None and sampling[name] not in values:
            return f"{name} = {sampling[name]!r} changes the distribution; set it to {values[0]}"
    return ""


#: A log-probability of 0 may be rounded up; a logit is larger than this.
_ABOVE_ZERO = 1e-3


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
    answer must have one log-probability per token. `stream_every`: see `Order`. `test`: decides
    which tokens of a draft stay; with a test, log-probabilities are always requested.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        stream_every: int = 0,
        session: str = "",
        responder: Responder = IN_GROUP,
        test: DraftTest | None = None,
    ) -> None:
        self.prompt_ids = prompt_ids
        if test is not None and sampling.get("logprobs") is None:
            sampling = {**sampling, "logprobs": 0}
        self.sampling = sampling
        self.test = test
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

    def begin(
        self, client: InstanceClient, dispatch: Dispatch, order_id: str, over: Over
    ) -> Attempting:
        return AttemptTask(self.attempt(client, dispatch, order_id), over)

    def begin_verified(
        self,
        client: InstanceClient,
        dispatch: Dispatch,
        order_id: str,
        passed: Passed,
        over: Over,
    ) -> Attempting:
        return AttemptTask(self.attempt_verified(client, dispatch, order_id, passed), over)

    async def attempt_verified(
        self, client: InstanceClient, dispatch: Dispatch, order_id: str, passed: Passed
    ) -> Outcome:
        """Sends two orders: the first gets the draft's log-probabilities under the new weights,
        which takes only the prefill that is needed anyway; the second continues after the kept
        tokens, from the KV cache."""
        sampling = {**self.sampling, "prompt_logprobs": 0}
        order = self._order(dispatch, order_id, max_new_tokens=1, sampling=sampling)
        output = await client.generate(order)
        if output.finish == "abort":
            return _nothing()
        thought = self._thought_of_draft(dispatch, output)
        kept = self.kept(dispatch, thought)
        rest = await passed(kept)
        if rest is None:
            return _nothing()
        self.transcript.verified([token.logprob for token in thought[:kept]])
        if rest.ends:
            return Outcome(0, "stop", (), Piece([], []))
        await asyncio.sleep(0)  # let earlier dispatches begin first
        return await self.attempt(client, rest, order_id)

    def kept(self, dispatch: Dispatch, thought: Sequence[PromptToken]) -> int:
        """How many leading tokens of the draft stay. A cut before tokens that a tool has answered
        leaves nothing, because the tool has already acted on them."""
        assert self.test is not None, "a draft of a payload that tests none"
        transcript = self.transcript
        drawn = zip(transcript.logprobs, transcript.joined.mask, strict=True)
        old = [logprob for logprob, generated in drawn if generated]
        greedy = is_greedy(self.sampling)
        kept = self.test.passed(dispatch, old[: len(thought)], thought, greedy=greedy)
        return kept if kept >= min(transcript.joined.settled, len(thought)) else 0

    def _thought_of_draft(self, dispatch: Dispatch, output: Output) -> list[PromptToken]:
        """One entry for each generated token of the draft. Raises AnswerUntrue."""
        version = dispatch.salt
        if any(made_by < version for made_by, _ in output.spans):
            raise AnswerUntrue(f"it should verify under version {version}, but used an older one")
        context = len(self.prompt_ids) + len(self.response_ids)
        prompt = output.prompt
        if prompt is None or len(prompt) != context - 1:
            told = 0 if prompt is None else len(prompt)
            raise AnswerUntrue(f"a context of {context} tokens came with {told} log-probabilities")
        response = prompt[len(self.prompt_ids) - 1 :]
        made = [
            t
            for t, generated in zip(response, self.transcript.joined.mask, strict=True)
            if generated
        ]
        draft = made[: sum(tokens for _, tokens in dispatch.draft)]
        if not all(-math.inf < token.logprob < _ABOVE_ZERO for token in draft):
            raise AnswerUntrue(
                "its prompt log-probabilities are invalid; start it with --logprobs-mode "
                "raw_logprobs or processed_logprobs"
            )
        return draft

    def _order(
        self,
        dispatch: Dispatch,
        order_id: str,
        max_new_tokens: int,
        sampling: Mapping[str, Any],
        stream_every: int = 0,
    ) -> Order:
        return Order(
            order_id,
            [*self.prompt_ids, *self.response_ids],
            max_new_tokens,
            f"v{dispatch.salt}",
            sampling,
            stream_every,
            self.session,
        )

    async def attempt(self, client: InstanceClient, dispatch: Dispatch, order_id: str) -> Outcome:
        most, every = dispatch.max_new_tokens, self.stream_every
        order = self._order(dispatch, order_id, most, self.sampling, every)
        collect = self.transcript.collect(dispatch.attempt) if self.stream_every else None
        output = await client.generate(order, collect)
        self._check(output)
        piece = Piece(output.token_ids, output.logprobs)
        return Outcome(len(output.token_ids), output.finish, output.spans, piece)

    def _check(self, output: Output) -> None:
        if self.sampling.get("logprobs") is None:
            return
        count = -1 if output.logprobs is None else len(output.logprobs)
        if count != len(output.token_ids):
            raise AnswerUntrue(
                f"{len(output.token_ids)} tokens came with {max(0, count)} log-probabilities"
            )


def _nothing() -> Outcome:
    """The outcome of an attempt that was stopped before it made a token."""
    return Outcome(0, "abort", (), Piece([], []))
