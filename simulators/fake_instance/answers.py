"""The answers in flight of a realtime instance: their texts, and what was streamed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Annotated, NamedTuple

import msgspec

from rollout_sched.live.ports import OnTokens, Order, Output, RequestRejected
from rollout_sched.simulators.fake_instance import fields
from rollout_sched.simulators.fake_instance import tokens as text
from rollout_sched.simulators.fake_instance.fields import Draws, Sampler
from rollout_sched.simulators.instance import Ended, SimInstance, SimRequest

Stream = tuple[int, ...]

#: The argument that sets the ids of responses (`said_on_demand`).
_IDS = "fake_response_ids"

IdsAndLogprobs = tuple[list[int], list[float] | None]


class CountedOutput(Output):
    """`cached_tokens`: tokens of the context that were in the prefix cache."""

    cached_tokens: int = 0


class OrderedResponse(NamedTuple):
    """What an order starts or continues with; the context has `made_tokens` of the response."""

    name: int
    made_tokens: int


class Line(NamedTuple):
    """The tokens that a request adds to a response: `start` are in the context."""

    name: int
    start: int
    draws: Draws

    def tokens(self, skip: int, spans: text.Spans, vocabulary: text.Vocabulary) -> list[int]:
        """Those after the first `skip`."""
        ids = text.tokens(self.draws.numbers, self.draws.place + skip, spans, vocabulary)
        if ids and not self.start + skip:
            ids[0] = self.name
        thought = 2 + self.name % 8 - self.start - skip  # tokens up to the end of its reasoning
        if vocabulary.thinks and 0 <= thought < len(ids):
            ids[thought] = vocabulary.end_of_thought
        return ids


#: The length of a response that stops by itself, in tokens, including those made before.
Lengths = Callable[[Order, OrderedResponse], int]


@dataclass(slots=True, eq=False)
class OpenAnswer:
    """An attempt in flight: its text, what was streamed of it, and who waits for it.

    line  the tokens that an engine would make without fields that it applies to a request
    said  its tokens up to the end of the response, if they are decided
    """

    id: str
    line: Line
    logprobs: bool
    on_tokens: OnTokens | None
    said: Sequence[int] | None
    stream: tuple[str, bytes, Stream]
    streamed: int = 0
    answer: asyncio.Future[CountedOutput] = field(init=False)


class OpenAnswers:
    """All answers in flight of one instance, by attempt number in order of arrival.

    With `versioned_text`, another version gives another text.
    """

    def __init__(
        self,
        lengths: Lengths,
        versioned_text: bool,
        vocabulary: text.Vocabulary = text.LARGEST,
    ) -> None:
        self.by_number: dict[int, OpenAnswer] = {}
        self._lengths = lengths
        self._versioned = versioned_text
        self._vocabulary = vocabulary
        self._attempts = 0
        self._numbers: dict[str, list[int]] = {}
        self._writing: dict[tuple[str, bytes, Stream], OpenAnswer] = {}

    def read(self, order: Order, on_tokens: OnTokens | None) -> tuple[SimRequest, OpenAnswer]:
        """Turn an order into a request for the simulated instance. Raises RequestRejected."""
        try:
            context = text.read(order.token_ids, self._vocabulary)
            said, made = said_on_demand(order)
        except ValueError as error:
            raise RequestRejected(str(error)) from None
        self._attempts += 1
        number = self._attempts
        draw = fields.draw(order.sampling, f"{order.id} {number}")
        drawn = text.name(context, draw, self._vocabulary)
        if said is None:
            name, made = context.name or drawn, context.made_tokens
            length = self._lengths(order, OrderedResponse(name, made))
        else:
            name, length = drawn, len(said)
            said = said[made:]
        line = Line(name, made, fields.draws(order.sampling, name, made))
        if fields.are_applied(order.sampling):
            said = self._sampled(order, context, line, length - made, said)
            length = made + len(said)
        # Only one request may write a line of text; a second one gets a line of its own.
        stream: Stream = (context.stream or name,)
        if (order.salt, context.prompt, stream) in self._writing:
            stream = (*stream, number)
        answer = OpenAnswer(
            order.id,
            line,
            order.sampling.get("logprobs") is not None,
            on_tokens,
            said,
            (order.salt, context.prompt, stream),
        )
        request = SimRequest(
            number,
            len(order.token_ids),
            max(1, length - made),
            order.max_new_tokens,
            prompt_stream=context.prompt,
            shared_tokens=context.prompt_tokens,
            stream=stream,
            known_tokens=context.known_tokens,
            salt=order.salt,
            priority=order.sampling.get("priority", 0),
        )
        return request, answer

    def open(self, number: int, answer: OpenAnswer) -> None:
        self._writing[answer.stream] = answer
        self.by_number[number] = answer
        self._numbers.setdefault(answer.id, []).append(number)

    def numbers_of(self, order_id: str) -> list[int]:
        return self._numbers.get(order_id, [])

    def stop_writing(self, answer: OpenAnswer) -> None:
        """The attempt was aborted: another may continue its text, unless one does already."""
        if self._writing.get(answer.stream) is answer:
            del self._writing[answer.stream]

    def close(self, number: int) -> OpenAnswer | None:
        """Remove a finished answer; None if nobody waits for it any more."""
        answer = self.by_number.pop(number, None)
        if answer is not None:
            self.stop_writing(answer)
            numbers = self._numbers[answer.id]
            numbers.remove(number)
            if not numbers:
                del self._numbers[answer.id]
        return answer

    def chunk(self, answer: OpenAnswer, tokens: int, spans: text.Spans) -> IdsAndLogprobs:
        """The tokens not streamed yet of an answer that has `tokens` tokens now."""
        new = self._text(answer, answer.streamed, _without(spans, answer.streamed))
        answer.streamed = tokens
        return new

    def output(self, answer: OpenAnswer, ended: Ended) -> CountedOutput:
        ids, logprobs = self._text(answer, 0, ended.spans)
        return CountedOutput(ids, logprobs, ended.reason, ended.spans, ended.cached_tokens)

    def _text(self, answer: OpenAnswer, skip: int, spans: text.Spans) -> IdsAndLogprobs:
        count, line = sum(count for _, count in spans), answer.line
        if answer.said is not None:
            ids = list(answer.said[skip : skip + count])
        else:
            spans = spans if self._versioned else [(0, count)]
            ids = line.tokens(skip, spans, self._vocabulary)
        logprobs = (
            text.logprobs(line.name, line.start + skip, len(ids)) if answer.logprobs else None
        )
        return ids, logprobs

    def _sampled(
        self,
        order: Order,
        context: text.Context,
        line: Line,
        length: int,
        said: Sequence[int] | None,
    ) -> Sequence[int]:
        """The tokens of a request with fields that the engine applies; `length`: how many it would
        have without. Raises ValueError."""
        vocabulary, sampling = self._vocabulary, order.sampling
        sampler = Sampler(sampling, order.token_ids, vocabulary, fresh=not line.start)
        constrained = fields.constrained(sampling, context.digest)
        if constrained is not None:
            said = text.encode(constrained, vocabulary)
        elif said is None:
            length = max(1, length, sampler.least + 1)
            made = min(length, order.max_new_tokens)
            # One more: a response that ends at its limit, ends by it.
            said = line.tokens(0, [(0, made + (length > made))], vocabulary)
        return sampler.drawn(said)


def said_on_demand(order: Order) -> tuple[Sequence[int] | None, int]:
    """The ids of a response that the request sets, and how many of those the context has.

    `fake_response_ids` is a list of responses. The first one that the context does not contain,
    after those before it, is generated. (None, 0) if it contains all. Raises ValueError.
    """
    asked = (order.sampling.get("extra_args") or {}).get(_IDS, ())
    try:
        responses = msgspec.convert(asked, list[Annotated[list[int], msgspec.Meta(min_length=1)]])
    except msgspec.ValidationError as error:
        raise ValueError(f"{_IDS}: {error}") from None
    context, at = list(order.token_ids) if responses else [], 0
    for ids in responses:
        while at < len(context) and context[at : at + len(ids)] != ids:
            at += 1
        if at == len(context):
            parts = range(min(len(ids), len(context)) - 1, 0, -1)
            return ids, next((made for made in parts if context[-made:] == ids[:made]), 0)
        at += len(ids)
    return None, 0


def _without(spans: text.Spans, tokens: int) -> list[tuple[int, int]]:
    """The spans of the tokens after the first `tokens`."""
    rest: list[tuple[int, int]] = []
    for version, count in spans:
        kept = max(0, count - tokens)
        tokens = max(0, tokens - count)
        if kept:
            rest.append((version, kept))
    return rest


# ------------------------------------------------------------------------------------------
# Find out when streamed attempts have a chunk to report.
#
# Every decoding attempt gains one token per step, so the step that fills its next chunk is known in
# advance: a heap by that step gives the next one. Attempts that do not decode yet are checked
# whenever the instance has made a decision. No work is done per token.

#: Called with the number of tokens that an attempt has made so far, and the step that made them.
OnProgress = Callable[[int, int], None]


@dataclass(slots=True, eq=False)
class _Stream:
    attempt: int
    every: int
    on_progress: OnProgress
    target: int = 1  # the first token comes alone, then `every` at a time, as in vLLM


class TokenStreams:
    """The streamed attempts of one instance."""

    def __init__(self, instance: SimInstance) -> None:
        self._instance = instance
        self._heap: list[tuple[int, int]] = []
        self._streams: dict[int, _Stream] = {}
        self._stalled: dict[int, _Stream] = {}

    def add(self, attempt: int, every: int, on_progress: OnProgress) -> None:
        """Call `on_progress` whenever the attempt has made `every` more tokens."""
        self._streams[attempt] = self._stalled[attempt] = _Stream(attempt, every, on_progress)

    def remove(self, attempt: int) -> None:
        self._streams.pop(attempt, None)
        self._stalled.pop(attempt, None)

    def next_at(self) -> float:
        """When to call `advance` next, in simulated seconds; infinite if the instance must make a
        decision first."""
        if not self._streams:
            self._heap.clear()
            return math.inf
        for stream in list(self._stalled.values()):
            self._foresee(stream)
        return self._instance.step_at(self._heap[0][0]) if self._heap else math.inf

    def advance(self, now: float) -> None:
        """Report everything that is due by now; the instance must have advanced to `now` before."""
        while self._heap and self._instance.step_at(self._heap[0][0]) <= now:
            step, attempt = heappop(self._heap)
            stream = self._streams.get(attempt)
            if stream is None or attempt in self._stalled:
                continue
            if self._is_made(stream, step, now):
                tokens, stream.target = stream.target, stream.target + stream.every
                stream.on_progress(tokens, step)
            self._foresee(stream)

    def _is_made(self, stream: _Stream, step: int, now: float) -> bool:
        """Whether this step, which is over, made the token that the stream waits for."""
        due = self._instance.due_step(stream.attempt, stream.target)
        if due is not None:
            return due == step
        # It may have been preempted in that step; some pauses preempt all requests first.
        return self._instance.progress(now).get(stream.attempt, 0) >= stream.target

    def _foresee(self, stream: _Stream) -> None:
        step = self._instance.due_step(stream.attempt, stream.target)
        if step is None:
            self._stalled[stream.attempt] = stream
        else:
            self._stalled.pop(stream.attempt, None)
            heappush(self._heap, (step, stream.attempt))
