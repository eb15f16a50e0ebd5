"""A gateway in virtual time with two instances that answer with the bytes that a target gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from rollout_sched.integrations.gateway.data_plane.call import KEEP_ALIVE
from rollout_sched.integrations.gateway.data_plane.data_plane import DataPlane
from rollout_sched.integrations.gateway.data_plane.reply import Limits
from rollout_sched.integrations.vllm.proxy import recognize
from rollout_sched.live.driver import Driver
from rollout_sched.live.settings import Settings
from tests.core.told import make_scheduler
from tests.fuzz.laws import Broken, Unreadable, hold, plain_json
from tests.live.scripted import Scripted

#: Virtual seconds within which every call must end, whatever the instances answer, and the most
#: attempts for one response.
ENDS_WITHIN_S = 600.0
MAX_ATTEMPTS = 64

ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
PROMPT = [11, 12, 13]
KEEPS_PARTIAL = {"use": "partial", "kv": "recompute", "at_update": "resubmit"}


class Asked(NamedTuple):
    """The call of an attempt, as it reaches an instance."""

    number: int
    path: str
    header_lines: bytes
    body: bytes
    receiver: Any


class _Exchange:
    """A call in flight, like one of the connection pool."""

    alone = True
    reusable = False

    def __init__(self, order_id: str) -> None:
        self.cancelled = False
        self._order_id = order_id

    def recognize(self, told: str) -> None:
        recognize(self, told, self._order_id)  # type: ignore[arg-type]

    def cancel(self) -> None:
        self.cancelled = True

    def pause(self) -> None: ...

    def resume(self) -> None: ...


#: Returns the status and bytes of an answer, in packets, and whether the connection then breaks.
Says = Callable[[Asked], tuple[int, list[bytes], bool]]


class Instance(Scripted):
    """Answers every call in the next iteration of the loop."""

    def __init__(self, name: str, says: Says, asked: list[Asked]) -> None:
        super().__init__(name)
        self.pool = None
        self.request_headers: list[tuple[bytes, bytes]] = []
        self._says = says
        self._asked_for = asked

    def pass_on(
        self,
        order_id: str,
        engine_id: str,
        path: str,
        header_lines: bytes,
        body: bytes,
        receiver: Any,
    ) -> _Exchange:
        asked = Asked(len(self._asked_for), path, header_lines, body, receiver)
        self._asked_for.append(asked)
        exchange = _Exchange(order_id)
        asyncio.get_running_loop().call_soon(self._answer, asked, exchange)
        return exchange

    def _answer(self, asked: Asked, exchange: _Exchange) -> None:
        """Like `http.client_connection`: silent once cancelled, and exactly one end."""
        status, parts, breaks = self._says(asked)
        receiver = asked.receiver
        if not exchange.cancelled:
            receiver.on_head(status, [(b"content-type", b"application/json")])
        for part in parts:
            if not exchange.cancelled:
                receiver.on_data(part)
        if exchange.cancelled:
            return
        if breaks:
            receiver.on_error(ConnectionError("the connection closed in the middle of the answer"))
        else:
            receiver.on_end()


class Client:
    """A client's request (`client_request.HttpRequest`), which must be answered at most once."""

    def __init__(self, target: str, body: bytes, headers: Mapping[bytes, bytes]) -> None:
        self.method = b"POST"
        self.target = target.encode()
        self.headers = list(headers.items())
        self.fields = dict(headers)
        self.body = body
        self.peer = "10.0.0.1"
        self.disconnected = False
        self.on_disconnect: Callable[[], None] | None = None
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        self.status = 0
        self.streamed = False
        self.data = bytearray()
        self.over = asyncio.Event()

    def answer(self, status: int, headers: Any, body: bytes) -> None:
        hold("a call is answered once", not self.status)
        self.status = status
        self.data += body
        self.over.set()

    def begin(self, status: int, headers: Any) -> None:
        hold("a call is answered once", not self.status)
        self.status, self.streamed = status, True

    def write(self, data: bytes) -> None:
        hold("nothing is sent after the end", self.streamed and not self.over.is_set(), data)
        self.data += data

    def end(self) -> None:
        hold("a call ends once", self.streamed and not self.over.is_set())
        self.over.set()


#: Responses that a call may ask for.
MOST_RESPONSES = 2_000


async def ask(
    target: str,
    body: bytes,
    says: Says,
    *,
    partial: bool = False,
    headers: Mapping[bytes, bytes] = {},
) -> tuple[Client, list[Asked]]:
    """Run one call to its end; returns it with the calls that the instances got for it.

    Raises Broken if the call does not end, or leaves anything behind.
    """
    asked: list[Asked] = []
    roles: dict[str, Any] = {"interruption": KEEPS_PARTIAL} if partial else {}
    scheduler = make_scheduler(batching="sync", **roles)
    driver = Driver(scheduler, settings=Settings(poll_s=1e6))
    limits = Limits(requests=MOST_RESPONSES)  # each costs time, and an input has a bound
    data_plane = DataPlane(driver, resumable=driver.view.keeps_partial, limits=limits)
    client = Client(target, body, headers)
    try:
        for name in ("a", "b"):
            await driver.add_instance(Instance(name, says, asked))
        data_plane.handle(client)
        async with asyncio.timeout(ENDS_WITHIN_S):
            await client.over.wait()
        for _ in range(3):
            await asyncio.sleep(0)
        open_ = (
            data_plane.calls.open.requests,
            data_plane.calls.open.body_bytes,
            len(scheduler.parts.requests),
        )
        hold("a call leaves nothing behind", open_ == (0, 0, 0), open_)
        hold("the scheduler is not broken", driver.broken is None, driver.broken)
        scheduler.check_invariants()
    except TimeoutError:
        raise Broken("every call ends", len(asked)) from None
    finally:
        await driver.close()
    return client, asked


def good_answer(asked: Asked) -> tuple[int, list[bytes], bool]:
    """A valid answer of two tokens, whole or streamed as requested."""
    try:
        streams = bool(plain_json(asked.body).get("stream"))
    except Unreadable as error:
        raise Broken("a request to an instance is JSON", (str(error), asked.body)) from None
    except RecursionError:  # nested too deeply for the reference parser
        streams = b'"stream":true' in asked.body
    if streams:
        events = [chunk(asked.path, [21]), chunk(asked.path, [22], finish="stop")]
        return 200, [*events, b"data: [DONE]\n\n"], False
    return 200, [answer(asked.path, [21, 22])], False


def answer(path: str, ids: list[int], finish: str = "stop") -> bytes:
    """An answer as from vLLM with return_token_ids."""
    usage = {"prompt_tokens": 3, "completion_tokens": len(ids), "total_tokens": 3 + len(ids)}
    choice = {"index": 0, **_said(path, ids, "message"), "finish_reason": finish}
    return _compact({"id": "x-1", "object": "o", "choices": [choice], "usage": usage})


def chunk(path: str, ids: list[int], finish: str | None = None) -> bytes:
    choice = {"index": 0, **_said(path, ids, "delta"), "finish_reason": finish}
    return b"data: " + _compact({"id": "x-1", "object": "o", "choices": [choice]}) + b"\n\n"


def _said(path: str, ids: list[int], role: str) -> dict[str, Any]:
    text = "".join(f"w{token} " for token in ids)
    named = {"token_ids": ids, "prompt_token_ids": PROMPT, "logprobs": None}
    if "chat" in path:
        return {role: {"role": "assistant", "content": text}, **named}
    return named if "generate" in path else {"text": text, **named}


def _compact(fields: Any) -> bytes:
    return msgspec.json.encode(fields)


def read_whole(data: bytes) -> dict[str, Any]:
    """A whole answer or an error. Raises Broken if it is not a JSON object."""
    try:
        told = plain_json(data)
    except (Unreadable, RecursionError) as error:
        raise Broken("a client's answer is JSON", (str(error), data)) from None
    hold("a client's answer is an object", isinstance(told, dict), data)
    return dict(told)


def read_events(data: bytes, unread: bytes = b"") -> list[dict[str, Any] | None]:
    """The events of a stream; None is `[DONE]`. Raises Broken if they are not server-sent events.

    The gateway passes events that contain `unread` on without parsing, so only their framing is
    checked.
    """
    hold("a stream ends with an empty line", data.endswith(b"\n\n"), data[-200:])
    events: list[dict[str, Any] | None] = []
    for event in data[:-2].split(b"\n\n"):
        if event == KEEP_ALIVE.strip():
            continue
        hold("an event is a line of data", event.startswith(b"data:"), event)
        said = event.removeprefix(b"data:").strip()
        hold("an event is one line", b"\n" not in said and b"\r" not in said, event)
        if unread and unread in said:
            events.append({"unread": said})
        else:
            events.append(None if said == b"[DONE]" else read_whole(said))
    hold("[DONE] comes last", None not in events[:-1], data[-400:])
    return events


def check_error(client: Client, *, passed_on: bool = False) -> None:
    """Check that a client without an answer got an error; `passed_on`: maybe an instance's text."""
    told = read_whole(bytes(client.data))
    hold("an error has an error status", 400 <= client.status < 600, client.status)
    hold("an error has a message", passed_on or "error" in told, told)
