"""The responses of one call, each a request of its own (`split`), joined at the end."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import msgspec

from rollout_sched.integrations.gateway.call import FIELD, JSON, Headers, Reply, Write
from rollout_sched.integrations.gateway.wire import Passing
from rollout_sched.live.ports import Outcome, Over

DONE = b"data: [DONE]"


class WholeReply(Reply, Protocol):
    """Where the joined answer goes."""

    def withdraw(self) -> None:
        """Give up the responses that are still open."""


class Fanout:
    """Gathers the replies to the responses of one call."""

    def __init__(self, reply: WholeReply, count: int, samples: int) -> None:
        self._reply = reply
        self._samples = samples
        self._answers: list[dict[str, Any] | None] = [None] * count
        self._open = count
        self._write: Write | None = None  # where the events go, once there are any
        self._over = False

    def child(self, index: int) -> Child:
        return Child(self, index)

    def answered(self, index: int, status: int, headers: bytes | Headers, body: bytes) -> None:
        if self._over:
            return
        if status != 200:
            self._over = True
            if self._write is not None:
                self._write(b"data: " + body + b"\n\n")
                self._reply.end()
            else:
                self._reply.answer(status, headers, body)
            self._reply.withdraw()
            return
        self._answers[index] = msgspec.json.decode(body)
        self._open -= 1
        if not self._open:
            self._over = True
            self._reply.answer(200, [JSON], msgspec.json.encode(self._joined()))

    def _joined(self) -> dict[str, Any]:
        answers = [answer for answer in self._answers if answer is not None]
        choices = []
        for index, answer in enumerate(answers):
            added = answer.pop(FIELD, None)
            choices.append({**answer["choices"][0], "index": index, FIELD: added})
        usages = [answer.get("usage") or {} for answer in answers]
        prompt = sum(usage.get("prompt_tokens", 0) for usage in usages[:: self._samples])
        made = sum(usage.get("completion_tokens", 0) for usage in usages)
        usage = {
            **usages[0],
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
        }
        return {**answers[0], "choices": choices, "usage": usage}

    # -- streams ---------------------------------------------------------------------------

    def in_turn(self, over: Over, outcome: Outcome) -> None:
        self._reply.in_turn(over, outcome)

    def begin(self, headers: Headers) -> None:
        if self._write is None and not self._over:
            self._write = self._reply.begin(headers)

    def write(self, index: int, events: bytes) -> None:
        if self._over or self._write is None:
            return
        for event in events.split(b"\n\n"):
            if not event or event.startswith(DONE):
                continue
            fields = msgspec.json.decode(event.removeprefix(b"data:"))
            for choice in fields.get("choices") or ():
                choice["index"] = index
            self._write(b"data: " + msgspec.json.encode(fields) + b"\n\n")

    def end(self) -> None:
        self._open -= 1
        if not self._open and not self._over and self._write is not None:
            self._over = True
            self._write(DONE + b"\n\n")
            self._reply.end()


class Child:
    """Where one of the responses goes."""

    def __init__(self, fanout: Fanout, index: int) -> None:
        self._fanout = fanout
        self._index = index

    def upstream(self, passing: Passing) -> None:
        """Slowing one of several streams down would not slow the others."""

    def in_turn(self, over: Over, outcome: Outcome) -> None:
        self._fanout.in_turn(over, outcome)

    def answer(self, status: int, headers: bytes | Headers, body: bytes) -> None:
        self._fanout.answered(self._index, status, headers, body)

    def begin(self, headers: Headers) -> Write:
        self._fanout.begin(headers)
        return partial(self._fanout.write, self._index)

    def end(self) -> None:
        self._fanout.end()
