"""Server-sent events, cut anywhere."""

from __future__ import annotations

import time

import pytest

from rollout_sched.integrations.vllm.protocol import answers as event_stream
from rollout_sched.integrations.vllm.protocol.answers import EventStream
from rollout_sched.live.ports import InstanceError

STREAM = (
    b': hello\r\n\r\ndata: {"a": 1}\n\ndata:{"b": 2}\r\n\r\n'
    b'event: x\ndata: {"c": 3}\n\ndata: [DONE]\n\n'
)


@pytest.mark.parametrize("size", [1, 2, 7, len(STREAM)])
def test_events_come_whole_however_they_are_cut(size):
    events = EventStream()
    parts = (STREAM[i : i + size] for i in range(0, len(STREAM), size))
    payloads = [payload for part in parts for payload in events.feed(part)]
    assert payloads == [b'{"a": 1}', b'{"b": 2}', b'{"c": 3}']


def test_several_lines_are_one_event():
    assert list(EventStream().feed(b'data: {"a":\ndata: 1}\n\n')) == [b'{"a": 1}']


def test_what_follows_the_end_is_not_the_streams():
    assert list(EventStream().feed(b"data: 1\n\ndata: [DONE]\n\ndata: 2\n\n")) == [b"1"]


def test_an_event_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(event_stream, "LONGEST_EVENT", 100)
    events = EventStream()
    assert list(events.feed(b"x" * 100)) == []
    with pytest.raises(InstanceError, match="more than 100 bytes"):
        list(events.feed(b"x"))


@pytest.mark.parametrize("lines", [False, True])
def test_an_event_without_end_costs_no_more_the_longer_it_is(lines):
    """Searching anew for each packet took minutes for what is here in a second."""
    packet = b"data: " + 1000 * (b"x\n" if lines else b"xx")
    events = EventStream()

    def seconds():
        start = time.perf_counter()
        for _ in range(2000):
            assert not list(events.feed(packet))
        return time.perf_counter() - start

    first = seconds()
    for _ in range(4):
        last = seconds()
    assert last < 10 * first
