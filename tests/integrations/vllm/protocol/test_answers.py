"""What is read of an answer, on both live paths."""

from __future__ import annotations

import time

import msgspec
import pytest

from rollout_sched.integrations.gateway.data_plane.answers import read_answer, read_event
from rollout_sched.integrations.vllm.dialects import Completions, Generate
from rollout_sched.integrations.vllm.protocol import answers as event_stream
from rollout_sched.integrations.vllm.protocol.answers import (
    EventStream,
    VersionSpan,
    WholeEvents,
    decoded,
    finish_of,
    spans_of,
    version_of,
)
from rollout_sched.live.ports import AnswerUntrue, InstanceError, WeightsUnknown

DECODE = msgspec.json.Decoder(dict[str, int]).decode

#: Everything that reads an answer or an event.
READERS = [
    Generate().read,
    Completions().read,
    read_event,
    lambda data: read_answer(data, "completions"),
]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("body", [b'{"error":{"message":"it died"}}', b'{ "error" : "it died"}'])
def test_an_error_in_an_answers_place_is_a_failure_and_no_lie(read, body):
    """What was streamed before it holds, so it must not pass for an untrue answer."""
    with pytest.raises(InstanceError, match="it died") as caught:
        read(body)
    assert type(caught.value) is InstanceError


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"choices":7}',
        b'{"choices":[{"text":"\xff","token_ids":[1],"finish_reason":"stop"}]}',
        b'{"x":' + b"[" * 100_000,
    ],
)
def test_malformed_answers_are_untrue(read, body):
    with pytest.raises(AnswerUntrue, match="is not valid"):
        read(body)


def test_a_field_called_error_that_says_nothing_is_no_failure():
    with pytest.raises(AnswerUntrue):
        decoded(DECODE, b'{"error":null}')
    assert decoded(DECODE, b'{"error":1}') == {"error": 1}


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("stop", "stop"),
        ("length", "length"),
        ("abort", "abort"),
        ("repetition", "stop"),
        ("tool_calls", "stop"),
        ("one of tomorrow's", "stop"),
    ],
)
def test_every_reason_but_an_error_ends_a_response(reason, finish):
    assert finish_of(reason) == finish


def test_an_error_is_no_end():
    with pytest.raises(InstanceError) as caught:
        finish_of("error")
    assert type(caught.value) is InstanceError  # what came before it holds


def test_an_answer_may_say_nothing_of_versions():
    assert spans_of(None, 3) == spans_of([], 3) == ()


@pytest.mark.parametrize(
    ("label", "version"),
    [
        ("0", 0),
        ("17", 17),
        *((label, None) for label in ("default", "", "-1", "1.0", "²", "9" * 5000, None, 17)),
    ],
)
def test_only_plain_integers_are_versions(label, version):
    assert version_of(label) == version


def test_spans_are_counts_and_equal_neighbours_are_one():
    told = [VersionSpan("3", 0, 2), VersionSpan("4", 2, 5), VersionSpan("4", 5, 6)]
    assert spans_of(told, 6) == ((3, 2), (4, 4))


def test_one_unknown_label_makes_all_unknown():
    assert spans_of([VersionSpan("default", 0, 2), VersionSpan("4", 2, 5)], 5) == ()


@pytest.mark.parametrize("labels", [["default"], ["default", "4"], ["4", "default"]])
def test_labelled_weights_never_have_the_default_label(labels):
    """It was restarted, and made these tokens with the weights of its start."""
    told = [VersionSpan(label, at, at + 1) for at, label in enumerate(labels)]
    assert spans_of(told, len(told)) == ()
    with pytest.raises(WeightsUnknown, match="it was restarted"):
        spans_of(told, len(told), labelled=True)


def test_a_foreign_label_is_no_restart():
    """As a trainer that loads the weights itself may, before it tells us of them."""
    assert spans_of([VersionSpan("step-7", 0, 2)], 2, labelled=True) == ()


@pytest.mark.parametrize(
    "bounds", [[(0, 2), (3, 5)], [(1, 5)], [(0, 4)], [(0, 3), (2, 5)], [(0, 5), (5, 5)], [(0, -1)]]
)
def test_spans_with_gaps_are_refused(bounds):
    with pytest.raises(InstanceError, match="do not cover"):
        spans_of([VersionSpan("1", start, end) for start, end in bounds], 5)


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


def test_data_after_the_end_is_ignored():
    assert list(EventStream().feed(b"data: 1\n\ndata: [DONE]\n\ndata: 2\n\n")) == [b"1"]


def test_an_event_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(event_stream, "LONGEST_EVENT", 100)
    events = EventStream()
    assert list(events.feed(b"x" * 100)) == []
    with pytest.raises(InstanceError, match="more than 100 bytes"):
        list(events.feed(b"x"))


@pytest.mark.parametrize("reader", [EventStream, WholeEvents])
@pytest.mark.parametrize("lines", [False, True])
def test_an_event_without_end_costs_no_more_the_longer_it_is(lines, reader):
    """Searching anew for each packet took minutes for what is here in a second."""
    packet = b"data: " + 1000 * (b"x\n" if lines else b"xx")

    def seconds(streams):
        """For as many packets, whatever the number of streams."""
        start = time.process_time()
        for _ in range(streams):
            events = reader()
            for _ in range(8000 // streams):
                assert not list(events.feed(packet))
        return time.process_time() - start

    assert seconds(1) < 20 * seconds(80)
