"""A client's call in SGLang's words (`POST /generate`), in front of either engine.

slime and miles speak only these. A call asks for one response to one prompt, which is made by
orders of ours, not by passing its body on. So a field without a meaning here is refused, and a
stream brings its response in one event, as SGLang's does if all is ready at once.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

import msgspec

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.model import DeliveredSample
from rollout_sched.core.model.records import MAX_COUNT, Count, Signed
from rollout_sched.integrations.gateway.data_plane.body import BYTES_PER_TOKEN, check_name, group_of
from rollout_sched.integrations.gateway.data_plane.call import (
    FIELD,
    JSON,
    Reply,
    added,
    weight_versions,
)
from rollout_sched.integrations.gateway.data_plane.fields import BadRequest
from rollout_sched.integrations.gateway.data_plane.stream import EVENT_STREAM
from rollout_sched.integrations.gateway.data_plane.unary_call import failure, header_lines
from rollout_sched.integrations.sglang.protocol import MAX_NEW_TOKENS, sampling_for_vllm
from rollout_sched.integrations.vllm.protocol.answers import DONE, LABEL_OF_A_START, as_event
from rollout_sched.live.ports import InstanceClient, InstanceError, Outcome, RequestRejected
from rollout_sched.live.requests.token_payload import TokenPayload

_Limit = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]


class SglangBody(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of SGLang's GenerateReqInput that have a meaning here.

    The prompt is `input_ids` or `text`. Log-probs are those of the response's tokens only.
    """

    input_ids: Annotated[list[Count], msgspec.Meta(min_length=1)] | None = None
    text: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    sampling_params: dict[str, Any] | None = None
    return_logprob: bool | None = None
    logprob_start_len: Literal[-1] | None = None
    top_logprobs_num: Literal[0] | None = None
    stream: bool = False
    rid: str | None = None
    session_id: str = ""
    priority: Signed = 0

    def __post_init__(self) -> None:
        if (self.input_ids is None) == (self.text is None):
            raise ValueError("give either input_ids or text")

    @property
    def siblings(self) -> str:
        """The group's name if the client gives none: calls with one prompt are siblings."""
        return group_of(memoryview(msgspec.json.encode(self.input_ids or self.text)))

    @property
    def tokens(self) -> int:
        """Of the prompt; an estimate if it is a text."""
        if self.input_ids is not None:
            return len(self.input_ids)
        return max(1, len(self.text or "") // BYTES_PER_TOKEN)


def read_body(data: bytes) -> tuple[SglangBody, dict[str, Any], int]:
    """The body, its sampling in vLLM's names, and its limit of new tokens. Raises BadRequest."""
    try:
        given = msgspec.json.decode(data, type=dict[str, Any])
        asked = {name: value for name, value in given.items() if value not in (None, False)}
        body = msgspec.convert(asked, SglangBody)
        sampling = sampling_for_vllm(body.sampling_params or {})
        limit = msgspec.convert(sampling.pop("max_tokens", MAX_NEW_TOKENS), _Limit)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, RequestRejected) as error:
        raise BadRequest(f"/generate: {error}") from error
    if body.return_logprob:
        sampling["logprobs"] = 0
    check_name("session_id", body.session_id)
    return body, sampling, limit


class SglangCall(TokenPayload):
    """The payload of a call: its tokens are made by orders, and its text is asked for at the end.

    `limit`: the most tokens that its response may have.
    """

    def __init__(
        self, body: SglangBody, sampling: dict[str, Any], limit: int, reply: Reply
    ) -> None:
        super().__init__(
            body.input_ids or [],
            sampling,
            session=body.session_id,
            responder=_Responder(self, reply),
        )
        self.body = body
        self.text = ""
        self.matched: str | int | None = None  # what ended the response
        self._limit = limit

    async def attempt(self, client: Any, dispatch: Dispatch, order_id: str) -> Outcome:
        if self.body.text is not None and not self.prompt_ids:
            token_ids = await client.tokenize(self.body.text)
            if not token_ids:
                raise InstanceError("it cannot turn the text of a prompt into tokens")
            self.prompt_ids = token_ids
        outcome = await super().attempt(client, dispatch, order_id)
        made = self.response_ids
        if outcome.piece is not None:
            made += outcome.piece.token_ids[: outcome.tokens]
        # After an abort it may be asked for no more.
        if outcome.finish in ("stop", "abort") or len(made) >= self._limit:
            await self._read(client, made, stopped=outcome.finish == "stop")
        return outcome

    async def _read(self, client: InstanceClient, made: list[int], *, stopped: bool) -> None:
        """The text, up to what ended it: without that, unless the client wants it too."""
        keeps = self.sampling.get("include_stop_str_in_output")
        text = await client.detokenize(made) or ""
        asked = self.sampling.get("stop") or []
        stops = [asked] if isinstance(asked, str) else asked
        # Of several, the one that is complete first.
        found = min(
            ((text.find(stop) + len(stop), stop) for stop in stops if stop in text), default=None
        )
        if stopped and found is not None:
            end, self.matched = found
            text = text[: end if keeps else end - len(self.matched)]
        elif stopped:
            self.matched = made[-1]
            if not keeps:
                text = await client.detokenize(made[:-1]) or "" if made[1:] else ""
        self.text = text

    def answer(self, sample: DeliveredSample) -> bytes:
        """SGLang's JSON."""
        token_ids, logprobs, versions = self.response_ids, self.logprobs, weight_versions(sample)
        finish: dict[str, Any] = {"type": sample.finish}
        if sample.finish == "stop":
            finish["matched"] = self.matched
        elif sample.finish == "length":
            finish["length"] = len(token_ids)
        elif sample.finish == "abort":
            finish["message"] = "aborted at the gateway"
        meta: dict[str, Any] = {
            "id": self.body.rid or secrets.token_hex(16),
            "finish_reason": finish,
            "prompt_tokens": len(self.prompt_ids),
            "completion_tokens": len(token_ids),
            "cached_tokens": 0,
            "weight_version": versions[-1]["version"] if versions else LABEL_OF_A_START,
            "weight_versions": versions,
        }
        if logprobs is not None:
            pairs = zip(logprobs, token_ids, strict=True)
            meta["output_token_logprobs"] = [(value, token, None) for value, token in pairs]
            meta["output_token_logprobs_length"] = len(token_ids)
        answer = {"text": self.text, "output_ids": token_ids, "meta_info": meta}
        return msgspec.json.encode({**answer, FIELD: msgspec.Raw(added(sample))})


class _Responder:
    """Answers the client (`live.ports.Responder`)."""

    def __init__(self, call: SglangCall, reply: Reply) -> None:
        self._call = call
        self._reply = reply

    def answer(self, sample: DeliveredSample) -> None:
        body = self._call.answer(sample)
        if not self._call.body.stream:
            headers = header_lines(sample.segments[-1].instance if sample.segments else "")
            self._reply.answer(200, headers, body)
            return
        write = self._reply.begin([EVENT_STREAM])
        write(as_event(body) + as_event(DONE))
        self._reply.end()

    def fail(self, reason: str, error: Exception | None) -> None:
        if reason != "withdrawn":
            status, body = failure(error)
            self._reply.answer(status, [JSON], body)
