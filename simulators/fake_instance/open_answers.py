"""The answers that a realtime instance has under way: their texts, and what was streamed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from rollout_sched.live.ports import OnTokens, Order, Output, RequestRejected
from rollout_sched.simulators.fake_instance import synthetic_tokens as text
from rollout_sched.simulators.instance.sim_request import Ended, SimRequest

Stream = tuple[int, ...]
IdsAndLogprobs = tuple[list[int], list[float] | None]


class Response(NamedTuple):
    """What an order is to begin or to go on with; `made_tokens` of it are in the context."""

    name: int
    made_tokens: int


#: How many tokens a response has when it stops by itself, those made before included.
Lengths = Callable[[Order, Response], int]


class OpenAnswer:
    """An attempt under way: its text, what was streamed of it, and who waits for it."""

    __slots__ = ("answer", "id", "logprobs", "name", "on_tokens", "start", "stream", "streamed")

    def __init__(self, order: Order, name: int, start: int, on_tokens: OnTokens | None) -> None:
        self.id = order.id
        self.name = name
        self.start = start  # tokens of this response that the context has
        self.logprobs = order.sampling.get("logprobs") is not None
        self.on_tokens = on_tokens
        self.streamed = 0
        self.stream: tuple[str, bytes, Stream] = ("", b"", ())
        self.answer: asyncio.Future[Output]


class OpenAnswers:
    """All of one instance, by attempt number in order of arrival.

    With `versioned_text` another version makes another text.
    """

    def __init__(self, lengths: Lengths, versioned_text: bool) -> None:
        self.by_number: dict[int, OpenAnswer] = {}
        self._lengths = lengths
        self._versioned = versioned_text
        self._attempts = 0
        self._numbers: dict[str, list[int]] = {}
        self._writing: set[tuple[str, bytes, Stream]] = set()

    def read(self, order: Order, on_tokens: OnTokens | None) -> tuple[SimRequest, OpenAnswer]:
        """What an order asks of the simulated instance. Raises RequestRejected."""
        try:
            context = text.read(order.token_ids)
        except ValueError as error:
            raise RequestRejected(str(error)) from None
        self._attempts += 1
        number = self._attempts
        name = context.name or text.name(context, _draw(order, number))
        answer = OpenAnswer(order, name, context.made_tokens, on_tokens)
        length = self._lengths(order, Response(name, context.made_tokens))
        # One line of text has one writer; a second one gets a line of its own.
        stream: Stream = (context.stream or name,)
        if (order.salt, context.prompt, stream) in self._writing:
            stream = (*stream, number)
        answer.stream = (order.salt, context.prompt, stream)
        request = SimRequest(
            number,
            len(order.token_ids),
            max(1, length - context.made_tokens),
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
        self._writing.add(answer.stream)
        self.by_number[number] = answer
        self._numbers.setdefault(answer.id, []).append(number)

    def of(self, order_id: str) -> list[int]:
        return self._numbers.get(order_id, [])

    def stop_writing(self, answer: OpenAnswer) -> None:
        """It was aborted: another may go on with its text."""
        self._writing.discard(answer.stream)

    def close(self, number: int) -> OpenAnswer | None:
        """It is over; None if nobody waits for it any more."""
        answer = self.by_number.pop(number, None)
        if answer is not None:
            self._writing.discard(answer.stream)
            numbers = self._numbers[answer.id]
            numbers.remove(number)
            if not numbers:
                del self._numbers[answer.id]
        return answer

    def chunk(self, answer: OpenAnswer, tokens: int, spans: text.Spans) -> IdsAndLogprobs:
        """What a stream has not brought yet of an answer that has so many tokens now."""
        new = self._text(answer, answer.streamed, _without(spans, answer.streamed))
        answer.streamed = tokens
        return new

    def output(self, answer: OpenAnswer, ended: Ended) -> Output:
        ids, logprobs = self._text(answer, 0, ended.spans)
        return Output(ids, logprobs, ended.reason, ended.spans)

    def _text(self, answer: OpenAnswer, skip: int, spans: text.Spans) -> IdsAndLogprobs:
        start = answer.start + skip
        if not self._versioned:
            spans = [(0, sum(count for _, count in spans))]
        ids = text.tokens(answer.name, start, spans)
        return ids, text.logprobs(answer.name, start, len(ids)) if answer.logprobs else None


def _draw(order: Order, number: int) -> str:
    """What a new response depends on besides its context: nothing if it is greedy."""
    sampling = order.sampling
    if sampling.get("temperature") == 0:
        return ""
    seed = sampling.get("seed")
    return f"{order.id} {number}" if seed is None else f"seed {seed}"


def _without(spans: text.Spans, tokens: int) -> list[tuple[int, int]]:
    """The spans of what comes after the first `tokens` tokens."""
    rest: list[tuple[int, int]] = []
    for version, count in spans:
        kept = max(0, count - tokens)
        tokens = max(0, tokens - count)
        if kept:
            rest.append((version, kept))
    return rest
