"""Answers as they go out on the wire."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.integrations.http.heads import JOIN_BELOW, Head
from rollout_sched.integrations.http.request import ReceivedRequest

pytestmark = pytest.mark.real_time


class Outlet:
    peer = "10.0.0.1"

    def __init__(self) -> None:
        self.keep_alive = True
        self.sent = b""
        self.completed = 0

        self.dropped = 0

    def send(self, data):
        self.sent += data

    def send_both(self, head, body):
        self.sent += head + body

    def complete(self):
        self.completed += 1

    def drop(self):
        self.dropped += 1


def make(method=b"GET", minor=1, headers=()):
    outlet = Outlet()
    return ReceivedRequest(outlet, method, b"/", Head(minor, list(headers)), b""), outlet


@pytest.mark.parametrize("size", [0, 5, JOIN_BELOW + 1])
def test_a_whole_answer(size):
    request, outlet = make()
    request.answer(200, [(b"a", b"b")], b"x" * size)
    head = b"HTTP/1.1 200 OK\r\na: b\r\ncontent-length: %d\r\n\r\n" % size
    assert outlet.sent == head + b"x" * size
    assert outlet.completed == 1


def test_a_stream():
    request, outlet = make()
    request.begin(201, b"a: b\r\n")
    request.write(b"0123456789")
    request.write(b"")
    request.write(b"!")
    assert not outlet.completed
    request.end()
    assert outlet.sent == (
        b"HTTP/1.1 201 Created\r\na: b\r\ntransfer-encoding: chunked\r\n\r\n"
        b"a\r\n0123456789\r\n1\r\n!\r\n0\r\n\r\n"
    )
    assert outlet.completed == 1


def test_a_stream_to_http_1_0_ends_with_the_connection():
    request, outlet = make(minor=0)
    request.begin(200, ())
    request.write(b"abc")
    request.end()
    assert outlet.sent == b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nabc"
    assert not outlet.keep_alive


def test_an_answer_names_the_end_of_its_connection():
    request, outlet = make(minor=0)
    request.answer(200, (), b"")
    assert b"\r\nconnection: keep-alive\r\n" in outlet.sent
    request, outlet = make()
    outlet.keep_alive = False
    request.answer(200, (), b"")
    assert b"\r\nconnection: close\r\n" in outlet.sent


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_status_without_a_body(status, streamed):
    request, outlet = make()
    if streamed:
        request.begin(status, ())
        request.write(b"abc")
        request.end()
    else:
        request.answer(status, (), b"abc")
    assert outlet.sent.endswith(b"\r\n\r\n")
    assert b"content-length" not in outlet.sent
    assert b"transfer-encoding" not in outlet.sent
    assert b"abc" not in outlet.sent


def test_head_gets_the_head():
    request, outlet = make(b"HEAD")
    request.answer(200, (), b"abc")
    assert outlet.sent == b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n"
    request, outlet = make(b"HEAD")
    request.begin(200, ())
    request.write(b"abc")
    request.end()
    assert outlet.sent == b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def test_an_answer_is_given_once():
    request, _ = make()
    with pytest.raises(RuntimeError, match="not begun"):
        request.write(b"")
    with pytest.raises(RuntimeError, match="not begun"):
        request.end()
    assert not request.begun
    request.answer(200, (), b"")
    assert request.begun
    for again in (lambda: request.answer(200, (), b""), lambda: request.begin(200, ())):
        with pytest.raises(RuntimeError, match="complete"):
            again()
    request, _ = make()
    request.begin(200, ())
    with pytest.raises(RuntimeError, match="being streamed"):
        request.answer(200, (), b"")


def test_a_header_that_is_refused_leaves_the_request_unanswered():
    request, outlet = make()
    for call in (lambda f: request.answer(200, f, b""), lambda f: request.begin(200, f)):
        with pytest.raises(ValueError, match="line break"):
            call([(b"a", b"b\r\nc: d")])
    request.answer(500, (), b"")
    assert outlet.completed == 1


@pytest.mark.parametrize("begun", [False, True])
def test_once_the_client_is_gone_nothing_is_an_error(begun):
    request, outlet = make()
    left = []
    request.on_disconnect = lambda: left.append(1)
    if begun:
        request.begin(200, ())
    sent = outlet.sent
    request.lose()
    assert (left, request.disconnected) == ([1], True)
    if begun:
        request.write(b"abc")
        request.end()
    else:
        request.answer(200, (), b"abc")
    assert (outlet.sent, outlet.completed) == (sent, 0)


def test_fields_by_name():
    request, _ = make(headers=[(b"a", b"1"), (b"b", b"2"), (b"a", b"3")])
    assert request.headers == [(b"a", b"1"), (b"b", b"2"), (b"a", b"3")]
    assert (request.fields[b"a"], request.fields.get(b"c")) == (b"1, 3", None)


def test_a_failed_request_is_answered_or_cut_off():
    request, outlet = make()
    request.fail()
    assert outlet.sent.startswith(b"HTTP/1.1 500 ")
    assert (outlet.completed, outlet.dropped) == (1, 0)
    request.fail()
    assert (outlet.completed, outlet.dropped) == (1, 0)

    begun, outlet = make()
    begun.begin(200, ())
    begun.fail()
    assert (outlet.completed, outlet.dropped) == (0, 1)

    lost, outlet = make()
    lost.lose()
    lost.fail()
    assert (outlet.sent, outlet.dropped) == (b"", 0)


async def test_an_exception_in_a_pause_ends_the_answer():
    said = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, told: said.append(told["message"]))
    request, outlet = make()
    request.pause()
    request.on_pause = request.on_resume = lambda: 1 / 0
    request.begin(200, ())
    request.pause()
    assert not outlet.dropped  # not within what the transport calls
    await asyncio.sleep(0)
    assert outlet.dropped == 1
    request.resume()
    assert said == ["pausing or resuming b'GET' b'/' failed"] * 2
