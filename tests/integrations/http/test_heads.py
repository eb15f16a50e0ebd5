"""Heads: what is accepted is what llhttp accepts, and what could be read two ways is refused."""

from __future__ import annotations

import pytest

from rollout_sched.integrations.http.errors import Malformed
from rollout_sched.integrations.http.heads import (
    CHUNKED,
    MAX_HEAD,
    MAX_INTERIM,
    MAX_LINES,
    AnswerHeads,
    HeadBuffer,
    has_body,
    is_request_line,
    read_request,
    read_response,
    status_line,
    write_fields,
)
from tests.integrations.http.wires import post


def lines(*of: str) -> bytes:
    return "\r\n".join(of).encode("latin-1")


def test_a_request_is_read():
    method, target, head = read_request(
        lines("POST /v1?a=b HTTP/1.1", "Host: a:1", "X-A:  two  words\t", "EMPTY:")
    )
    assert (method, target, head.minor) == (b"POST", b"/v1?a=b", 1)
    assert head.headers == [(b"host", b"a:1"), (b"x-a", b"two  words"), (b"empty", b"")]
    assert head.fields[b"x-a"] == b"two  words"


def test_a_response_is_read():
    status, head = read_response(lines("HTTP/1.0 404 Not Found", "A: b"))
    assert (status, head.minor, head.headers) == (404, 0, [(b"a", b"b")])
    assert read_response(b"HTTP/1.1 200 ")[0] == read_response(b"HTTP/1.1 200")[0] == 200


def test_repeated_fields_are_one_list():
    assert read_response(lines("HTTP/1.1 200 OK", "a: 1", "b: 2", "A: 3"))[1].fields == {
        b"a": b"1, 3",
        b"b": b"2",
    }


@pytest.mark.parametrize(
    "head",
    [
        "GET  / HTTP/1.1",
        "GET / HTTP/2.0",
        "GET / HTTP/1.1 ",
        "GET /a b HTTP/1.1",
        "G\u00e9T / HTTP/1.1",
        "GET /\x00 HTTP/1.1",
        "GET /\x7f HTTP/1.1",
        "GET /caf\u00e9 HTTP/1.1",
        "get",
        "",
        "GET / HTTP/1.1\nhost: x",
        "GET / HTTP/1.1\r\nhost : x",
        "GET / HTTP/1.1\r\n host: x",
        "GET / HTTP/1.1\r\na: b\r\n folded",
        "GET / HTTP/1.1\r\na: b\nc: d",
        "GET / HTTP/1.1\r\na: b\rc: d",
        "GET / HTTP/1.1\r\na: b\x00",
        "GET / HTTP/1.1\r\nbad name: x",
        "GET / HTTP/1.1\r\n: x",
        "GET / HTTP/1.1\r\nnothing",
        "GET / HTTP/1.1\r\nhost: a\r\nhost: b",
        "GET / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 1",
    ],
)
def test_malformed_requests_are_refused(head):
    with pytest.raises(Malformed):
        read_request(head.encode("latin-1"))


@pytest.mark.parametrize(
    "line", ["HTTP/1.1 20 OK", "HTTP/1.1 2000", "HTTP/1.1 099", "HTTP/3 200", "ICY 200 OK", ""]
)
def test_malformed_status_lines_are_refused(line):
    with pytest.raises(Malformed):
        read_response(line.encode())


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ((), 7),
        (("content-length: 0",), 0),
        (("Content-Length: 12",), 12),
        (("transfer-encoding: Chunked",), CHUNKED),
    ],
)
def test_the_length_of_a_body(fields, length):
    assert read_response(lines("HTTP/1.1 200 OK", *fields))[1].length(7) == length


@pytest.mark.parametrize(
    "fields",
    [
        ("content-length: -1",),
        ("content-length: +1",),
        ("content-length: 1_0",),
        ("content-length: 5, 5",),
        ("content-length: 0x5",),
        ("content-length:",),
        ("content-length: " + "9" * 19,),
        ("content-length: 5", "transfer-encoding: chunked"),
        ("transfer-encoding: gzip, chunked",),
        ("transfer-encoding: identity",),
        ("transfer-encoding:",),
    ],
)
def test_a_body_of_doubtful_length_is_refused(fields):
    head = read_response(lines("HTTP/1.1 200 OK", *fields))[1]
    with pytest.raises(Malformed):
        head.length(0)


def test_http_1_0_knows_no_chunks():
    with pytest.raises(Malformed):
        read_response(lines("HTTP/1.0 200 OK", "transfer-encoding: chunked"))[1].length(0)


@pytest.mark.parametrize(
    ("version", "connection", "keep"),
    [
        ("1.1", None, True),
        ("1.1", "close", False),
        ("1.1", "Upgrade , CLOSE", False),
        ("1.1", "keep-alive", True),
        ("1.0", None, False),
        ("1.0", "Keep-Alive", True),
        ("1.0", "x", False),
    ],
)
def test_keep_alive_follows_version_and_connection_field(version, connection, keep):
    fields = [] if connection is None else [f"connection: {connection}"]
    assert read_response(lines(f"HTTP/{version} 200 OK", *fields))[1].keep_alive is keep


@pytest.mark.parametrize("read", [read_request, read_response])
def test_lines_are_counted_before_they_are_read(read):
    first = b"GET / HTTP/1.1" if read is read_request else b"HTTP/1.1 200 OK"
    assert len(read(first + b"\r\na: b" * MAX_LINES)[-1].headers) == MAX_LINES
    with pytest.raises(Malformed, match="more than 100 header lines") as error:
        read(first + b"\r\nno header line" * (MAX_LINES + 1))
    assert error.value.status == 431


def test_fields_are_written_one_to_a_line():
    assert write_fields([(b"a", b"1"), (b"b", b"2")]) == b"a: 1\r\nb: 2\r\n"
    assert write_fields(b"a: 1\r\n") == b"a: 1\r\n"
    assert write_fields(()) == b""


@pytest.mark.parametrize(
    "field", [(b"a", b"1\r\nb: 2"), (b"a\n", b"1"), (b"a", b"\r"), (b"a", b"\n")]
)
def test_a_field_cannot_break_out_of_its_line(field):
    with pytest.raises(ValueError, match="line break"):
        write_fields([field])


def test_status_lines():
    assert status_line(200) == b"HTTP/1.1 200 OK\r\n"
    assert status_line(299) == b"HTTP/1.1 299 \r\n"
    assert [has_body(s) for s in (100, 200, 204, 304, 500)] == [False, True, False, False, True]
    assert is_request_line(b"GET / HTTP/1.1")
    assert not is_request_line(b"GET /\r\n HTTP/1.1")


# -- Heads are cut where they end, however they come --

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


def test_read_bytes_are_dropped():
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
def test_targets_without_a_path_are_refused(target):
    buffer = HeadBuffer(1000)
    buffer.feed(post(target))
    assert buffer.head() is not None
    with pytest.raises(Malformed, match="neither a path"):
        buffer.cut_authority(b"POST", target.encode())


@pytest.mark.parametrize("whole", [True, False])
def test_a_head_that_is_too_long(whole):
    head = post("/hot", b"")
    for limit in (len(head), len(head) - 1):
        buffer = HeadBuffer(limit)
        buffer.feed(head if whole else head[:-1])
        if limit == len(head):
            assert (buffer.head() is not None) == whole
        else:
            with pytest.raises(Malformed, match="longer than") as raised:
                buffer.head()
            assert raised.value.status == 431


# -- Heads of answers, in packets --

EARLY = b"HTTP/1.1 103 Early Hints\r\na: b\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n"


@pytest.mark.parametrize("packet", [1, 7, 1000])
def test_interim_answers_are_passed_over(packet):
    data = EARLY * 2 + HEAD + b"abc"
    heads = AnswerHeads()
    assert not heads.begun
    told = []
    for at in range(0, len(data), packet):
        told.append(heads.read(data[at : at + packet]))
        if told[-1]:
            break
        assert heads.begun
    assert (heads.status, heads.head.length(0)) == (200, 3)
    assert heads.rest == b"abc"[: len(heads.rest)]
    assert not heads.begun  # of the next answer


def test_each_answer_may_have_its_interim_ones():
    heads = AnswerHeads()
    for _ in range(3):
        assert heads.read(EARLY * MAX_INTERIM + HEAD)
    with pytest.raises(Malformed, match="interim"):
        heads.read(EARLY * (MAX_INTERIM + 1))


def test_answer_heads_a_head_that_is_too_long():
    line = b"HTTP/1.1 200 OK\r\na: "
    fits = line + b"x" * (MAX_HEAD - len(line) - 4) + b"\r\n\r\n"
    assert AnswerHeads().read(fits)
    with pytest.raises(Malformed, match="longer than"):
        AnswerHeads().read(fits[:-4] + b"x\r\n\r\n")
    with pytest.raises(Malformed, match="longer than"):
        AnswerHeads().read(fits[:-4] + b"xxxx")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/1.1 103 Early\r\ncontent-length: 1\r\n\r\n",
        b"HTTP/1.1 103 Early\r\nconnection: close\r\n\r\n",  # nothing may come behind it
    ],
)
def test_impossible_interim_answers_are_refused(answer):
    with pytest.raises(Malformed):
        AnswerHeads().read(answer)
