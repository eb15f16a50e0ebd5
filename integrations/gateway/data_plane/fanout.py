"""Joins the responses of one call, each of which is a request of its own (`split`)."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Protocol

import msgspec

from rollout_sched.integrations.gateway.data_plane.answers import read_object
from rollout_sched.integrations.gateway.data_plane.call import (
    FIELD,
    JSON,
    Reply,
    UpstreamCall,
    Write,
    error_body,
)
from rollout_sched.integrations.gateway.data_plane.client_request import Headers
from rollout_sched.integrations.gateway.data_plane.resume import usage as total_usage
from rollout_sched.integrations.vllm.protocol.answers import DONE, as_event, data_of_each
from rollout_sched.live.ports import InstanceError, Outcome, Over

log = logging.getLogger(__name__)


class WholeReply(Reply, Protocol):
    """Where the joined answer goes."""

    def withdraw(self) -> None:
        """Withdraw the requests that are still open."""


class Fanout:
    """Gathers the responses of one call; the first error ends the call.

    For the reply it is the single upstream (`call.UpstreamCall`) of all its streams.
    """

    def __init__(self, reply: WholeReply, count: int, samples: int) -> None:
        self._reply = reply
        self._samples = samples
        self._answers: list[dict[str, Any] | None] = [None] * count
        self._usages: list[dict[str, Any] | None] = [None] * count  # events with only the usage
        self._open = set(range(count))
        self._write: Write | None = None  # where the events go; None before the first
        self._over = False
        self._upstreams: list[UpstreamCall] = []
        self._paused = False

    @property
    def aborted(self) -> bool:
        return self._reply.aborted

    def child(self, index: int) -> Child:
        return Child(self, index)

    def answered(self, index: int, status: int, headers: bytes | Headers, body: bytes) -> None:
        """One response is complete."""
        if self._over:
            return
        if status != 200:
            self._fail(status, headers, body)
            return
        try:
            self._answers[index] = read_object(body)
            self._open.discard(index)
            if self._open:
                return
            whole = msgspec.json.encode(self._joined())
        except Exception as error:
            self._break_down(error)
            return
        self._over = True
        self._reply.answer(200, [JSON], whole)

    def _break_down(self, error: Exception) -> None:
        log.error("answers could not be joined", exc_info=error)
        self._fail(502, [JSON], error_body(502, f"the answers could not be joined: {error!r}"))

    def _fail(self, status: int, headers: bytes | Headers, body: bytes) -> None:
        self._over = True
        try:
            if self._write is not None:
                self._write(as_event(body))
                self._reply.end(status)
            else:
                self._reply.answer(status, headers, body)
        finally:
            self._reply.withdraw()

    def _joined(self) -> dict[str, Any]:
        answers = [answer for answer in self._answers if answer is not None]
        choices: list[dict[str, Any]] = []
        for answer in answers:
            added = answer.pop(FIELD, None)
            for choice in answer["choices"]:
                choices.append({**choice, "index": len(choices), FIELD: added})
        return {**answers[0], "choices": choices, "usage": self._usage(answers)}

    def _usage(self, answers: list[dict[str, Any]]) -> dict[str, Any]:
        """The usage of all responses; samples of one prompt count it once."""
        usages = [answer.get("usage") or {} for answer in answers]
        prompt = sum([usage.get("prompt_tokens", 0) for usage in usages[:: self._samples]])
        made = sum([usage.get("completion_tokens", 0) for usage in usages])
        return {**usages[0], **total_usage(prompt, made)}

    # -- streams ---------------------------------------------------------------------------

    def upstream(self, upstream_call: UpstreamCall) -> None:
        if not self._upstreams:
            self._reply.upstream(self)
        self._upstreams.append(upstream_call)
        if self._paused:
            upstream_call.pause()

    def pause(self) -> None:
        self._paused = True
        for upstream_call in self._upstreams:
            upstream_call.pause()

    def resume(self) -> None:
        self._paused = False
        for upstream_call in self._upstreams:
            upstream_call.resume()

    def cancel(self) -> None:
        for upstream_call in self._upstreams:
            upstream_call.cancel()

    def paced(self, over: Over, outcome: Outcome) -> None:
        self._reply.paced(over, outcome)

    def begin(self, headers: Headers) -> None:
        if self._write is None and not self._over:
            self._write = self._reply.begin(headers)

    def write(self, index: int, events: bytes) -> None:
        """Pass on events of one response. Raises InstanceError for invalid events, and then passes
        on none of them."""
        write = self._write
        if self._over or write is None:
            return
        told = []
        for data in data_of_each(events):
            if data == DONE:
                continue
            fields = read_object(data)
            if "error" in fields:
                self._fail(_status_of(fields["error"]), [], data)
                return
            choices = fields.get("choices")
            if not isinstance(choices, list):
                continue  # the event says nothing about a response
            if not choices and fields.get("usage"):
                self._usages[index] = fields
                continue
            for choice in choices:
                if not isinstance(choice, dict):
                    raise InstanceError("invalid event: a choice is not an object")
                choice["index"] = index
            told.append(as_event(msgspec.json.encode(fields)))
        if told:
            write(b"".join(told))

    def end(self, index: int) -> None:
        """The stream of one response has ended."""
        self._open.discard(index)
        write = self._write
        if self._open or self._over or write is None:
            return
        last = as_event(DONE)
        usages = [usage for usage in self._usages if usage is not None]
        try:
            if usages:
                joined = {**usages[0], "usage": self._usage(usages)}
                last = as_event(msgspec.json.encode(joined)) + last
        except Exception as error:
            self._break_down(error)
            return
        self._over = True
        try:
            write(last)
        finally:
            self._reply.end()


def _status_of(error: Any) -> int:
    """The status that an error event names; 502, an instance's fault, if it names none."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 502


class Child:
    """The reply of one of the responses."""

    def __init__(self, fanout: Fanout, index: int) -> None:
        self._fanout = fanout
        self._index = index

    @property
    def aborted(self) -> bool:
        return self._fanout.aborted

    def upstream(self, upstream_call: UpstreamCall) -> None:
        self._fanout.upstream(upstream_call)

    def paced(self, over: Over, outcome: Outcome) -> None:
        self._fanout.paced(over, outcome)

    def answer(self, status: int, headers: bytes | Headers, body: bytes) -> None:
        self._fanout.answered(self._index, status, headers, body)

    def begin(self, headers: Headers) -> Write:
        self._fanout.begin(headers)
        return partial(self._fanout.write, self._index)

    def end(self, status: int = 200) -> None:
        self._fanout.end(self._index)
