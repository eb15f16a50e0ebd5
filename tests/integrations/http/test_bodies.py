"""Bodies: every framing ends where it should, however its bytes are cut into packets."""

from __future__ import annotations

import itertools

import pytest

from rollout_sched.integrations.http.bodies import (
    FAIR_CHUNK,
    MAX_CHUNK_LINE,
    MAX_TRAILERS,
    SPARE_CHUNKS,
    BodyBudget,
    Chunked,
    Length,
    UntilClose,
    body_of,
)
from rollout_sched.integrations.http.errors import Malformed
from rollout_sched.integrations.http.heads import CHUNKED, MAX_LINES, UNTIL_CLOSE

MOST = 2**20


def feed(body, *packets):
    """All payload, and what came after the end; None if there was no end."""
    whole = b""
    for i, packet in enumerate(packets):
        payload, rest = body.feed(packet)
        whole += payload
        if rest is not None:
            return whole, rest + b"".join(packets[i + 1 :])
    return whole, None


def test_the_framing_asked_for():
    assert isinstance(body_of(3, 9, fair=True), Length)
    assert isinstance(body_of(CHUNKED, 9, fair=True), Chunked)
    assert isinstance(body_of(UNTIL_CLOSE, 9, fair=True), UntilClose)


def test_a_length_is_kept_to():
    assert feed(Length(3), b"ab") == (b"ab", None)
    assert feed(Length(3), b"ab", b"c") == (b"abc", b"")
    assert feed(Length(3), b"ab", b"cde") == (b"abc", b"de")
    assert feed(Length(0), b"") == (b"", b"")
    assert feed(Length(0), b"a") == (b"", b"a")


def test_chunk_lines_and_trailers_may_be_as_long_as_their_limits():
    line = b"1;" + b"a" * (MAX_CHUNK_LINE - 4) + b"\r\n"
    trailers = b"0\r\n" + b"a: b\r\n" * MAX_LINES + b"\r\n"
    for packets in ([line + b"x\r\n" + trailers], [line[:-1], line[-1:] + b"x\r\n" + trailers]):
        assert feed(Chunked(1, fair=True), *packets) == (b"x", b"")


@pytest.mark.parametrize("length", [CHUNKED, UNTIL_CLOSE, 11])
def test_a_body_that_announces_too_much_is_refused(length):
    with pytest.raises(Malformed, match="longer than 10 bytes") as error:
        body_of(length, 10, fair=True).feed(b"b\r\n" if length == CHUNKED else b"x" * 11)
    assert error.value.status == 413


TINY = b"1\r\nx\r\n"


@pytest.mark.parametrize("size", [3, 7, 10_000])
def test_very_many_tiny_chunks_are_refused_where_that_matters(size):
    data = TINY * (SPARE_CHUNKS + 1) + b"0\r\n\r\n"
    packets = [data[i : i + size] for i in range(0, len(data), size)]
    with pytest.raises(Malformed, match="too many small chunks"):
        feed(Chunked(MOST, fair=True), *packets)
    assert len(feed(Chunked(MOST, fair=False), *packets)[0]) == SPARE_CHUNKS + 1


def test_many_chunks_of_an_honest_size_are_not():
    chunks = [b"x"] * 1000 + [b"y" * FAIR_CHUNK] * 10_000
    assert feed(Chunked(MOST, fair=True), frame(chunks)) == (b"".join(chunks), b"")


def test_until_close_has_no_end():
    assert feed(UntilClose(MOST), b"a", b"b") == (b"ab", None)


@pytest.mark.parametrize(
    ("data", "payload"),
    [
        (b"0\r\n\r\n", b""),
        (b"3\r\nabc\r\n0\r\n\r\n", b"abc"),
        (b"00A;x=y\r\n0123456789\r\n1;q\r\n!\r\n0;end\r\n\r\n", b"0123456789!"),
        (b"1\r\na\r\n0\r\nTrailer: x\r\nOther: y\r\n\r\n", b"a"),
    ],
)
def test_chunks_are_joined(data, payload):
    assert feed(Chunked(MOST, fair=True), data) == (payload, b"")
    assert feed(Chunked(MOST, fair=True), data + b"next") == (payload, b"next")
    assert feed(Chunked(MOST, fair=True), data[:-1]) == (payload, None)
    assert feed(Chunked(MOST, fair=True), *[data[i : i + 1] for i in range(len(data))]) == (
        payload,
        b"",
    )


def test_a_packet_of_many_chunks_is_one_piece():
    assert Chunked(MOST, fair=True).feed(b"1\r\na\r\n1\r\nb\r\n1\r\nc") == (b"abc", None)


@pytest.mark.parametrize(
    "data",
    [
        b"g\r\n",
        b"\r\n",
        b"-1\r\n",
        b"0x1\r\na\r\n",
        b"1_0\r\n",
        b"1\na\n0\n\n",
        b"1\r\nab\r\n",
        b"1\r\na\n\n",
        b"F" * 16 + b"\r\n",
        b"1;" + b"a" * MAX_CHUNK_LINE,
        b"1;" + b"a" * (MAX_CHUNK_LINE - 3) + b"\r\na\r\n0\r\n\r\n",
        b"0\r\n" + b"a: b\r\n" * (MAX_LINES + 1) + b"\r\n",
        b"%x\r\n" % (MOST + 1),
        b"DE0B6B3A7640000\r\n",
        b"1\r\na\r\n%x\r\n" % MOST,
        b"1;\x00\r\n",
        b"1 ;a\r\na\r\n0\r\n\r\n",
        b"1;a \r\na\r\n0\r\n\r\n",
        b"1;:\r\na\r\n0\r\n\r\n",
        b'1;a="\r\na\r\n0\r\n\r\n',
        b"0\r\ncontent-length: 3\r\n\r\n",
        b"0\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"0\r\nbad trailer\r\n\r\n",
        b"0\r\na: b\nc: d\r\n\r\n",
        b"0\r\na: " + b"b" * MAX_TRAILERS,
    ],
)
def test_bad_chunks_are_refused(data):
    with pytest.raises(Malformed):
        feed(Chunked(MOST, fair=True), data)
    with pytest.raises(Malformed):
        feed(Chunked(MOST, fair=True), *[data[i : i + 1] for i in range(len(data))])


def frame(chunks: list[bytes], end: bytes = b"0\r\n\r\n") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in chunks) + end


def cut(data: bytes, at: list[int]) -> list[bytes]:
    places = sorted({i % (len(data) + 1) for i in at} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


# -- What of bodies is here, and what finds no room --


def test_bodies_without_room_are_refused_and_counted():
    budget = BodyBudget(100)
    budget.used = 90
    refusals = [budget.full(), budget.full()]
    assert [refusal.status for refusal in refusals] == [503, 503]
    assert "90 bytes" in str(refusals[0])
    assert (budget.refused, budget.used) == (2, 90)
