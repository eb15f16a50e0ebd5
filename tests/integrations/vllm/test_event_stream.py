"""Server-sent events, cut anywhere."""

from __future__ import annotations

import pytest

from rollout_sched.integrations.vllm import event_stream
from rollout_sched.integrations.vllm.event_stream import EventStream
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


def test_a_line_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(event_stream, "LONGEST_LINE", 100)
    events = EventStream()
    assert list(events.feed(b"x" * 100)) == []
    with pytest.raises(InstanceError, match="more than 100 bytes"):
        list(events.feed(b"x"))
