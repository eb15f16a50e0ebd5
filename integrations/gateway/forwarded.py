"""A call that is answered at once: the payload of a request that does not stream."""

from __future__ import annotations

from typing import Any

import msgspec

from rollout_sched.core.actions import Dispatch
from rollout_sched.core.events import Spans
from rollout_sched.core.model import Sample
from rollout_sched.integrations.gateway import dialects
from rollout_sched.integrations.gateway.call import (
    FIELD,
    JSON,
    Call,
    Reply,
    added,
    error_body,
    with_added,
)
from rollout_sched.integrations.gateway.dialects import Part
from rollout_sched.integrations.gateway.wire import Forwarding, announce, refuse
from rollout_sched.live.ports import InstanceError, Outcome, RequestRejected

Answer = dict[str, Any]


class Raw(msgspec.Struct):
    """An answer as it came; the whole response in one piece."""

    body: bytes


class Last(msgspec.Struct):
    """The last part of a response, and the answer that brought it."""

    part: Part
    answer: Answer


class Forwarded:
    """Passes an answer through; joins it where it took several attempts."""

    def __init__(self, call: Call, reply: Reply, max_tokens: int) -> None:
        self.call = call
        self.reply = reply
        self.max_tokens = max_tokens
        self._pieces: dict[int, Raw | Part | Last] = {}

    async def attempt(self, client: Forwarding, dispatch: Dispatch, order_id: str) -> Outcome:
        parts = self._parts()
        if parts:
            prompt_ids = self.call.prompt_ids(parts)
            assert prompt_ids is not None  # see _partial
            path, body = self.call.resumed(dispatch, prompt_ids, parts)
        else:
            path, body = self.call.first(dispatch, self.max_tokens)
        announce(client, path, order_id)
        headers = [*self.call.headers, *client.request_headers]
        headers.append((b"x-request-id", order_id.encode()))
        response = await client.pool.request("POST", path.decode(), headers, body)
        if response.status != 200:
            raise refuse(response.status, response.body)
        return self._outcome(response.body, first=not parts)

    def _outcome(self, body: bytes, *, first: bool) -> Outcome:
        finish = dialects.finish_of(body)
        if finish == "abort":
            return self._partial(dialects.decode(body))
        spans: Spans = ()
        piece: Raw | Last
        if first:
            tokens = dialects.tokens_of(body)
            piece = Raw(body)
            if self.call.endpoint == "generate":
                spans = dialects.spans_of(dialects.decode(body))
        else:
            answer = dialects.decode(body)
            part = dialects.part_of(answer)
            if part is None:
                raise InstanceError("the answer gives no token_ids")
            tokens, spans, piece = (
                len(part.token_ids),
                dialects.spans_of(answer),
                Last(part, answer),
            )
        return Outcome(tokens, "length" if finish == "length" else "stop", spans, piece)

    def _partial(self, answer: Answer) -> Outcome:
        """Interrupted. Without its tokens there is nothing to go on from, so it starts anew."""
        part = dialects.part_of(answer)
        if part is None or self.call.prompt_ids([part]) is None:
            return Outcome(0, "abort", (), None)
        return Outcome(len(part.token_ids), "abort", dialects.spans_of(answer), part)

    def _parts(self) -> list[Part]:
        parts = (p.part if isinstance(p, Last) else p for p in self._pieces.values())
        return [part for part in parts if isinstance(part, Part)]

    # -- the driver's store ----------------------------------------------------------------

    def streamed(self, attempt: int) -> int:
        return 0

    def partial(self, attempt: int, tokens: int) -> None:
        """Nothing comes before the answer."""

    def keep(self, attempt: int, tokens: int, piece: Raw | Part | Last | None) -> None:
        if piece is None:
            return
        if isinstance(piece, Part) and len(piece.token_ids) > tokens:
            piece.token_ids = piece.token_ids[:tokens]
        self._pieces[attempt] = piece

    def drop(self, attempt: int) -> None:
        if attempt:
            self._pieces.pop(attempt, None)
        else:
            self._pieces.clear()

    # -- answering -------------------------------------------------------------------------

    def answer(self, sample: Sample) -> None:
        headers = [JSON]
        if sample.segments:
            headers.append((b"x-rollout-sched-instance", sample.segments[-1].instance.encode()))
        pieces = list(self._pieces.values())
        first, last = pieces[0], pieces[-1]
        if isinstance(first, Raw):
            self.reply.answer(200, headers, self._whole(first.body, sample))
            return
        assert isinstance(last, Last)
        answer = dialects.join(self.call.endpoint, self._parts(), last.answer)
        self._strip(answer)
        answer[FIELD] = msgspec.Raw(added(sample))
        self.reply.answer(200, headers, msgspec.json.encode(answer))

    def _whole(self, body: bytes, sample: Sample) -> bytes:
        if not self.call.resumable or self.call.keep_ids:
            return with_added(body, sample)
        answer = dialects.decode(body)
        self._strip(answer)
        return with_added(msgspec.json.encode(answer), sample)

    def _strip(self, answer: Answer) -> None:
        """The ids that only we had asked for."""
        if not self.call.keep_ids:
            answer.pop("prompt_token_ids", None)
            for choice in answer["choices"]:
                choice.pop("token_ids", None)
                choice.pop("prompt_token_ids", None)

    def fail(self, reason: str, error: Exception | None) -> None:
        if reason == "withdrawn":
            return
        if isinstance(error, RequestRejected):
            self.reply.answer(error.status, [JSON], error.body)
        else:
            self.reply.answer(502, [JSON], error_body(502, f"no instance could answer: {error}"))
