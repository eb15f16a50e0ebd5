"""Answers to the trainer's orders: read in any packets, and accepted only if they can be true.

An input is a digit, which selects the dialect and whether log-probs are requested, and the bytes of
an event stream.
"""

from __future__ import annotations

import random
from typing import Any

from rollout_sched.integrations.vllm.dialects import AnswerAssembler, Completions, Dialect, Generate
from rollout_sched.integrations.vllm.protocol.answers import EventStream
from rollout_sched.live.ports import InstanceError, Order, Output
from tests.fuzz.fixtures import ENDPOINTS, chunk
from tests.fuzz.laws import Unreadable, cuts, hold, packets, plain_json
from tests.fuzz.streams import DONE, STREAMS, WORDS

LIMIT = 8
DIALECTS: tuple[Dialect, ...] = (Generate(), Completions())
_LOGPROBS = b',"logprobs":{"content":[{"logprob":-1.5,"token_id":1}],"token_logprobs":[-1.5]}'
_USAGE = b',"usage":{"completion_tokens":1}'
_VERSIONS = b',"weight_versions":[{"version":"3","start":0,"end":1}]'


class Orders:
    name = "orders"
    words = (
        *(
            *WORDS,
            _LOGPROBS,
            _VERSIONS,
            b'"version":"' + b"9" * 30 + b'"',
            _USAGE,
            b"-9999.0",
            b"2147483648",
        ),
        *(b'"start":0', b'"end":-1', b"true", b"1.0"),
    )
    corpus = (
        *(b"%d%b" % (n % 4, stream) for n, stream in enumerate(STREAMS * 2)),
        b'0data: {"choices":[{"token_ids":[3],"finish_reason":""}]}\n\n',
        b'0data: {"choices":[{"token_ids":[3],"finish_reason":"stop"}]' + _USAGE + b"}\n\n",
        b'2data: {"choices":[{"token_ids":[3]}]' + _USAGE + b"}\n\n" + b"data: {}\n\n",
        b'0data: {"choices":[{"token_ids":[1],"finish_reason":"stop"' + _VERSIONS + b"}]}\n\n",
        b'1data: {"choices":[{"token_ids":[1],"finish_reason":"stop"' + _LOGPROBS + b"}]}\n\n",
        b'3data: {"choices":[{"token_ids":[1],"finish_reason":"stop"' + _LOGPROBS + b"}]}\n\n",
        b'0data: {"choices":[{"token_ids":[1],"finish_reason":"st\xffop"}]}\n\n',
        b'0data: {"choices":[{"token_ids":[1],"finish_reason":"\\ud800"}]}\n\n',
        b'0data: {"choices":' + b"[" * 5000 + b"\n\n",
    )

    def make(self, rng: random.Random) -> bytes:
        number = rng.randrange(4)
        path = ENDPOINTS[2] if number < 2 else ENDPOINTS[0]
        events = [chunk(path, [n]) for n in range(rng.randrange(LIMIT + 2))]
        events.append(chunk(path, [1], rng.choice(("stop", "length", "abort", "error"))))
        if rng.random() < 0.5:
            extra = rng.choice((_LOGPROBS, _VERSIONS))
            events = [event.replace(b',"logprobs":null', extra) for event in events]
        return b"%d" % number + b"".join(events) + rng.choice((b"", DONE))

    def check(self, data: bytes) -> None:
        if data[:1] not in (b"0", b"1", b"2", b"3"):
            return
        dialect, wanted = DIALECTS[int(data[:1]) // 2], bool(int(data[:1]) % 2)
        plain = _payloads(data[1:])
        for cut in cuts(data[1:]):
            stream = EventStream()
            told = [payload for packet in cut for payload in stream.feed(packet) if payload]
            hold("packet boundaries do not change an event", told == plain, (told, plain))
        self._assemble(dialect, wanted, plain)

    def _assemble(self, dialect: Dialect, wanted: bool, payloads: list[bytes]) -> None:
        sampling = {"logprobs": 0} if wanted else {}
        order = Order("id", [1, 2], LIMIT, "v0", sampling)
        streamed: list[int] = []
        assembly = AnswerAssembler(order, lambda ids, logprobs: streamed.extend(ids))
        try:
            for payload in payloads:
                assembly.add(dialect.read(payload))
            output = assembly.output()
        except InstanceError:  # includes untrue answers
            hold("no more tokens than the limit are accepted", len(streamed) <= LIMIT, streamed)
            return
        self._check(output, streamed, payloads, wanted)

    def _check(
        self, output: Output, streamed: list[int], payloads: list[bytes], wanted: bool
    ) -> None:
        ids: list[Any] = []
        before_end: list[Any] = []
        for payload in payloads:
            try:
                readable = payload.decode(errors="replace").encode()  # in unused fields
                event = plain_json(readable)
                choices = event["choices"]
            except (Unreadable, RecursionError) as error:
                hold("an accepted event is JSON", False, (str(error), payload))
            told = [token for choice in choices for token in choice.get("token_ids") or ()]
            ids += told
            made = (event.get("usage") or {}).get("completion_tokens")
            hold("the reported number of tokens has arrived", made in (None, len(ids)), (made, ids))
            if all(choice.get("finish_reason") is None for choice in choices):
                before_end += told
        hold("an answer has the tokens of its events", output.token_ids == ids, (output, ids))
        hold(
            "the streamed tokens are those before the end", streamed == before_end, (streamed, ids)
        )
        hold("no more tokens than the limit are accepted", len(ids) <= LIMIT, ids)
        hold("tokens are numbers", all(type(token) is int for token in ids), ids)
        if wanted:
            count = -1 if output.logprobs is None else len(output.logprobs)
            hold("each token has a log-prob", count == len(ids), output)
        counted = sum(tokens for _, tokens in output.spans)
        hold("spans cover the tokens", counted in (0, len(ids)), output)

    def spend(self, data: bytes) -> None:
        stream = EventStream()
        for packet in packets(data[1:], 256):
            for payload in stream.feed(packet):
                assembly = AnswerAssembler(Order("id", [1], LIMIT, "v0", {}))
                try:
                    assembly.add(DIALECTS[0].read(payload))
                except InstanceError:
                    continue


def _payloads(data: bytes) -> list[bytes]:
    """The payloads of a stream's complete events up to `[DONE]`, parsed at once by the standard."""
    lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    payloads = []
    for event in lines.split(b"\n\n")[:-1]:
        told = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
        payloads.append(b" ".join(told))
    if b"[DONE]" in payloads:
        payloads = payloads[: payloads.index(b"[DONE]")]
    return [payload for payload in payloads if payload]
