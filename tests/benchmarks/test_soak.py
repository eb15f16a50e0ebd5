"""The soak, tiny, and that its verdict sees what it is there to see."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import pytest

from benchmarks.soak import __main__ as command
from benchmarks.soak import flood, hostile, innocents, load
from benchmarks.soak.innocents import TOKENS, WrongAnswer
from benchmarks.soak.verdict import MIB, Arm, Seen, findings, growth
from benchmarks.soak.wire import Answer, Line
from tests.live.scripted import until


def test_a_few_hundred_calls_get_what_they_must(monkeypatch):
    monkeypatch.setattr(command, "WARM_UP_S", 0.5)
    monkeypatch.setattr(command, "REST_S", 0.1)
    monkeypatch.setattr(hostile, "SLOW_S", 0.5)
    monkeypatch.setattr(flood, "OPEN", 100)
    monkeypatch.setattr(flood, "TOKENS", 1_000)
    monkeypatch.setattr(load, "HOSTILE_SHARE", 0.3)
    found = {one.name: one for one in command.soak(400, 100.0, seed=1)}
    # Growth and latencies need more calls than a test can make.
    for name in ("answers", "hostile", "state"):
        assert found[name].holds, found[name]


@pytest.mark.real_time
async def test_a_connection_that_the_gateway_has_closed_is_not_used_again():
    async def close_after_one(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(close_after_one, "127.0.0.1", 0)
    line = await Line.open(server.sockets[0].getsockname()[1])
    await line.send(b"POST / HTTP/1.1\r\n\r\n")
    assert (await line.answer()).status == 200
    assert line.keeps, "the answer does not say that it closes"
    await until(lambda: not line.usable)
    server.close()


# -- the verdict ---------------------------------------------------------------------------


def sound() -> Seen:
    seen = Seen(Arm([0.010] * 100, calls=100), Arm([0.015] * 100, calls=100))
    seen.memory = [(float(second), 100.0 * MIB) for second in range(60)]
    seen.quiet, seen.flooded = Arm([0.010] * 100, calls=100), Arm([0.025] * 100, calls=100)
    seen.batches = {False: [2.0, 1.0, 1.5], True: [1.4]}
    seen.hostile = {"deep": Counter({"400": 3})}
    return seen


def broken(seen: Seen) -> list[str]:
    return [finding.name for finding in findings(seen) if not finding.holds]


def test_a_sound_run_breaks_nothing():
    assert broken(sound()) == []


@pytest.mark.parametrize(
    ("name", "value"), [("hung", 1), ("server_errors", 1), ("wrong", Counter({"no": 1}))]
)
def test_one_innocent_is_enough(name, value):
    seen = sound()
    setattr(seen.beside, name, value)
    assert broken(seen) == ["answers"]


def test_nothing_seen_is_not_sound():
    assert broken(Seen()) == ["latency", "flood", "trainer", "answers", "hostile"]


def test_slow_beside_hostile_clients_is_broken():
    seen = sound()
    seen.beside.latencies_s[:2] = [0.030, 0.030]
    assert broken(seen) == ["latency"]


def test_a_flood_that_holds_up_others_is_broken():
    seen = sound()
    seen.flooded.latencies_s[:2] = [0.040, 0.040]
    seen.batches[True] = [1.3, 1.2]
    assert broken(seen) == ["flood", "trainer"]


def test_leftovers_and_wrong_answers_break_a_run():
    seen = sound()
    seen.left = "open 1"
    seen.unexpected["deep: 500"] = 1
    assert broken(seen) == ["hostile", "state"]


def test_memory_may_swing_but_not_climb():
    swings = [(float(t), (100 + 10 * (t % 7)) * MIB) for t in range(60)]
    assert growth(swings) < 4 * MIB
    seen = sound()
    seen.memory = [(t, level + t * MIB / 2) for t, level in swings]
    assert broken(seen) == ["memory"]


# -- innocents -----------------------------------------------------------------------------


def asked(kind: str) -> tuple[innocents.Asking, str]:
    """A call of a kind, and its name."""
    for number in range(1, 1000):
        asking = innocents.asking(number, "key", random.Random(number))
        body = json.loads(asking.data.partition(b"\r\n\r\n")[2])
        wanted = "prompt" in body and "n" not in body and not asking.cancelled
        if wanted and bool(body.get("stream")) is (kind == "stream"):
            return asking, f"soak-{number}"
    raise AssertionError(kind)


def said(name: str, tokens: int = TOKENS, finish: str | None = "length") -> dict[str, object]:
    choice = {"index": 0, "text": "w1 " * tokens, "finish_reason": finish}
    return {"id": f"cmpl-{name}-0", "choices": [choice]}


def test_a_whole_answer_of_its_own_is_right():
    asking, name = asked("whole")
    asking.check(Answer(200, json.dumps(said(name)).encode()))


@pytest.mark.parametrize("wrong", ["status", "tokens", "name", "cut", "no end"])
def test_any_other_whole_answer_is_wrong(wrong):
    asking, name = asked("whole")
    told = said(name)
    if wrong == "tokens":
        told = said(name, TOKENS + 1)
    elif wrong == "name":
        told = said(name + "1")
    elif wrong == "no end":
        told = said(name, finish=None)
    body = json.dumps(told).encode()
    answer = Answer(502 if wrong == "status" else 200, body[:-1] if wrong == "cut" else body)
    with pytest.raises(WrongAnswer):
        asking.check(answer)


def test_a_stream_is_right_with_its_end_only():
    asking, name = asked("stream")
    events = [said(name, 3, None), said(name, TOKENS - 3)]
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    asking.check(Answer(200, body + b"data: [DONE]\n\n"))
    for cut in (body, body + b"data: [DONE]", body * 2 + b"data: [DONE]\n\n"):
        with pytest.raises(WrongAnswer):
            asking.check(Answer(200, cut))
