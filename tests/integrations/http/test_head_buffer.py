"""Heads are cut where they end, however they come."""

from __future__ import annotations

import pytest

from rollout_sched.integrations.http.errors import Malformed
from rollout_sched.integrations.http.heads import HeadBuffer
from tests.integrations.http.wires import post

REQUEST = post("/hot", b"abc")


@pytest.mark.parametrize("packet", [1, 7, len(REQUEST), 1000])
@pytest.mark.parametrize("before", [b"", b"\r\n"])
def test_requests_in_packets(packet, before):
    data = (before + REQUEST) * 3
    buffer = HeadBuffer(1000)
    found = []
    head = None
    for at in range(0, len(data), packet):
        buffer.feed(data[at : at + packet])
        while buffer.data:
            head = head or buffer.head()
            if head is None or len(buffer.data) - buffer.pos < 3:
                break
            found.append((head, buffer.body(3)))
            head = None
    assert found == [(REQUEST[: -len(b"\r\n\r\nabc")], b"abc")] * 3
    assert not buffer.data


def test_what_was_read_is_not_kept():
    buffer = HeadBuffer(1000)
    buffer.feed(b"\r\n" + REQUEST + b"rest")
    buffer.head()
    assert buffer.last_head() == REQUEST[:-3]
    assert buffer.rest() == b"abcrest"
    assert (buffer.data, buffer.pos) == (b"", 0)


def test_an_absolute_target_becomes_its_path_for_us_and_for_whoever_reads_it_next():
    buffer = HeadBuffer(1000)
    buffer.feed(post("http://other:1/hot?q", b"abc"))
    assert buffer.head() is not None
    assert buffer.cut_authority(b"POST", b"http://other:1/hot?q") == b"/hot?q"
    assert buffer.last_head() == post("/hot?q", b"abc")[:-3]
    assert buffer.body(3) == b"abc"


@pytest.mark.parametrize("target", ["*", "other:443", "ftp://other/hot"])
def test_what_is_no_path_is_refused(target):
    buffer = HeadBuffer(1000)
    buffer.feed(post(target))
    assert buffer.head() is not None
    with pytest.raises(Malformed, match="neither a path"):
        buffer.cut_authority(b"POST", target.encode())


@pytest.mark.parametrize("whole", [True, False])
def test_a_head_that_is_too_long(whole):
    head = post("/hot", b"")
    for most in (len(head), len(head) - 1):
        buffer = HeadBuffer(most)
        buffer.feed(head if whole else head[:-1])
        if most == len(head):
            assert (buffer.head() is not None) == whole
        else:
            with pytest.raises(Malformed, match="longer than") as raised:
                buffer.head()
            assert raised.value.status == 431
