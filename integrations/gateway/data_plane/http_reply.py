"""The answer to a client over HTTP, which ends exactly once."""

from __future__ import annotations

import logging

from rollout_sched.integrations.gateway.data_plane.call import JSON, Write, error_body
from rollout_sched.integrations.gateway.data_plane.http_request import Headers, HttpRequest
from rollout_sched.integrations.gateway.data_plane.limits import Limits
from rollout_sched.integrations.gateway.data_plane.open_calls import OpenCalls
from rollout_sched.integrations.gateway.data_plane.responses import CLIENT_LEFT
from rollout_sched.integrations.gateway.data_plane.scheduling import Scheduling
from rollout_sched.integrations.gateway.data_plane.upstream import UpstreamCall
from rollout_sched.integrations.vllm.protocol.event_stream import as_event
from rollout_sched.live.ports import Outcome, Over

log = logging.getLogger(__name__)


class HttpReply:
    """The answer to a client over HTTP; its call counts as `count` responses and `body_bytes`.

    It ends exactly once: by its answer, the end of its stream, a failure of the gateway or a
    disconnect of the client. Then its responses no longer count against the limits, unfinished ones
    are withdrawn after a failure or disconnect, and later output for it is dropped.
    """

    __slots__ = (
        "_begun",
        "_body_bytes",
        "_calls",
        "_count",
        "_request",
        "_requests",
        "_scheduling",
        "_streams",
        "over",
    )

    def __init__(
        self,
        calls: OpenCalls,
        scheduling: Scheduling,
        request: HttpRequest,
        count: int,
        body_bytes: int,
    ) -> None:
        self.over = False
        self._requests: list[str] = []
        self._calls = calls
        self._scheduling = scheduling
        self._request = request
        self._count = count
        self._body_bytes = body_bytes
        self._streams = 0
        self._begun = calls.responses.begin()
        calls.enter(self, count, body_bytes)
        request.on_disconnect = self._gone

    def submitted(self, name: str) -> None:
        """One of the responses was submitted as request `name`."""
        self._requests.append(name)
        if self.over:
            self.withdraw()

    def leave(self) -> bool:
        """End the call; False if it had ended before."""
        if self.over:
            return False
        self.over = True
        self._calls.leave(self, self._count, self._body_bytes)
        self._calls.pacer.streams -= self._streams
        return True

    def _leave_with(self, status: int) -> bool:
        """End the call with `status`; False if it had ended before."""
        if not self.leave():
            return False
        request = self._request
        self._calls.responses.end(request.method, request.target, status, self._begun)
        return True

    def withdraw(self) -> None:
        """Withdraw its requests: no client waits for the answer any more."""
        for name in self._requests:
            try:
                self._scheduling.withdraw(name)
            except Exception as error:
                log_failure(error)

    def fail(self, status: int, text: str) -> None:
        """End the call with an error, if it has not ended: a stream gets an error event."""
        if not self._leave_with(status):
            return
        body = error_body(status, text)
        try:
            if self._streams:
                self._request.write(as_event(body))
                self._request.end()
            else:
                self._request.answer(status, error_headers(status, self._calls.limits), body)
        finally:
            self.withdraw()

    def _gone(self) -> None:
        if self._leave_with(CLIENT_LEFT):
            self.withdraw()

    def _crashed(self, error: Exception) -> None:
        log_failure(error)
        self.fail(500, f"the gateway failed: {error}")

    def upstream(self, upstream_call: UpstreamCall) -> None:
        self._request.on_pause = upstream_call.pause
        self._request.on_resume = upstream_call.resume

    def paced(self, over: Over, outcome: Outcome) -> None:
        self._calls.pacer.take(over, outcome, self._crashed)

    def answer(self, status: int, headers: bytes | Headers, body: bytes) -> None:
        if self._leave_with(status):
            self._request.answer(status, headers, body)

    def begin(self, headers: Headers) -> Write:
        if not self.over:
            self._streams = 1
            self._calls.pacer.streams += 1
            self._request.begin(200, headers)
        return self._write

    def _write(self, data: bytes) -> None:
        if not self.over:
            self._request.write(data)

    def end(self, status: int = 200) -> None:
        if self._leave_with(status):
            self._request.end()


def error_headers(status: int, limits: Limits) -> Headers:
    retry = (b"retry-after", b"%d" % limits.retry_after_s)
    return [JSON, retry] if status == 503 else [JSON]


def log_failure(error: Exception | BaseException) -> None:
    log.error("a call failed in the gateway", exc_info=error)
