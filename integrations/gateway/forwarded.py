"""A call that is answered at once: the payload of a request that does not stream."""

from __future__ import annotations

from functools import lru_cache
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
from rollout_sched.integrations.gateway.wire import Forwarding, refuse
from rollout_sched.integrations.http.client import Gathering
from rollout_sched.integrations.http.heads import Headers, write_fields
from rollout_sched.live.ports import Attempting, Outcome, Over, RequestRejected

Answer = dict[str, Any]

#: Bytes of an answer.
MOST = 256 * 2**20

NO_IDS = error_body(502, "the instance gives no token_ids, so an interrupted response cannot go on")


@lru_cache(256)
def header_lines(instance: str) -> bytes:
    """Of an answer whose last tokens this instance made."""
    named = (b"x-rollout-sched-instance", instance.encode())
    return write_fields([JSON, named] if instance else [JSON])


class Raw(msgspec.Struct):
    """An answer as it came; the whole response in one piece."""

    body: bytes


class Share(msgspec.Struct):
    """A part of a response, and the answer that brought it."""

    part: Part
    answer: Answer


class Forwarded:
    """Passes an answer through; joins it where it took several attempts."""

    def __init__(self, call: Call, reply: Reply, max_tokens: int) -> None:
        self.call = call
        self.reply = reply
        self.max_tokens = max_tokens
        self._pieces: dict[int, Raw | Share] = {}

    def begin(
        self, client: Forwarding, dispatch: Dispatch, order_id: str, over: Over
    ) -> Attempting:
        parts = self._parts()
        if parts:
            prompt_ids = self.call.prompt_ids(parts)
            assert prompt_ids is not None  # see outcome
            path, body = self.call.resumed(dispatch, prompt_ids, parts)
        else:
            path, body = self.call.first(dispatch, self.max_tokens)
        segment = dispatch.max_new_tokens < self.max_tokens - dispatch.response_tokens
        receiver = Receiver(self, over, whole=not parts, segment=segment)
        return self.call.pass_on(client, order_id, path, body, receiver)

    def outcome(self, body: bytes, *, whole: bool, segment: bool) -> Outcome:
        """What an answer says. `whole`: it is the first attempt; `segment`: its "length" is not the
        end."""
        said = dialects.finish_of(body)
        if whole and said != "abort" and not (segment and said == "length"):
            spans: Spans = ()
            if self.call.endpoint == "generate":
                spans = dialects.spans_of(dialects.decode(body))
            finish: Any = "length" if said == "length" else "stop"
            return Outcome(dialects.tokens_of(body), finish, spans, Raw(body))
        answer = dialects.decode(body)
        part = dialects.part_of(answer)
        if part is None or self.call.prompt_ids([*self._parts(), part]) is None:
            if said == "abort":
                # Without its tokens there is nothing to go on from: it starts anew.
                return Outcome(0, "abort", (), None)
            raise RequestRejected("the instance gives no token_ids to go on from", 502, NO_IDS)
        finish = said if said in ("abort", "length") else "stop"
        return Outcome(len(part.token_ids), finish, dialects.spans_of(answer), Share(part, answer))

    def _parts(self) -> list[Part]:
        return [share.part for share in self._pieces.values() if isinstance(share, Share)]

    # -- the driver's store ----------------------------------------------------------------

    def streamed(self, attempt: int) -> int:
        return 0

    def partial(self, attempt: int, tokens: int) -> None:
        """Nothing comes before the answer."""

    def keep(self, attempt: int, tokens: int, piece: Raw | Share | None) -> None:
        if isinstance(piece, Share):
            del piece.part.token_ids[tokens:]
        if isinstance(piece, Raw) or (tokens and piece is not None):
            self._pieces[attempt] = piece

    def drop(self, attempt: int) -> None:
        if attempt:
            self._pieces.pop(attempt, None)
        else:
            self._pieces.clear()

    # -- answering -------------------------------------------------------------------------

    def answer(self, sample: Sample) -> None:
        headers = header_lines(sample.segments[-1].instance if sample.segments else "")
        pieces = list(self._pieces.values())
        first, last = pieces[0], pieces[-1]
        if isinstance(first, Raw):
            self.reply.answer(200, headers, self._whole(first.body, sample))
            return
        assert isinstance(last, Share)
        answer = dialects.join(self.call.endpoint, self._parts(), last.answer, sample.finish)
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


class Receiver(Gathering):
    """Gets the answer to one attempt."""

    __slots__ = ("_over", "_owner", "_segment", "_whole")

    def __init__(self, owner: Forwarded, over: Over, *, whole: bool, segment: bool) -> None:
        super().__init__(MOST)
        self._owner = owner
        self._over = over
        self._whole = whole
        self._segment = segment

    def arrived(self, status: int, headers: Headers, body: bytes) -> None:
        try:
            if status != 200:
                raise refuse(status, body)
            outcome = self._owner.outcome(body, whole=self._whole, segment=self._segment)
        except Exception as error:
            self._over(error)
        else:
            self._over(outcome)

    def on_error(self, error: Exception) -> None:
        self._over(error)
