"""Tokens of a stream, counted late and together."""

from __future__ import annotations

import pytest

from rollout_sched.integrations.gateway.data_plane.stream import READ_TOGETHER, StreamTokens

EVENT = b'data: {"choices":[{"token_ids":[%b]}]}\n\n'


def test_nothing_has_come() -> None:
    tokens = StreamTokens(1)
    assert (tokens.count, tokens.arrived, tokens.to_go_on_from()) == (0, False, [])


def test_what_was_read_counts_at_once() -> None:
    tokens = StreamTokens(1)
    tokens.add(b"1,2", speaks=True)
    tokens.add(b"", speaks=False)
    tokens.add(b"3", speaks=False)
    assert (tokens.count, tokens.to_go_on_from(), tokens.events) == (3, [1, 2, 3], 0)


def test_an_event_without_ids_is_a_token_that_nobody_can_go_on_from() -> None:
    tokens = StreamTokens(1)
    tokens.add(b"", speaks=True)
    assert (tokens.count, tokens.events, tokens.to_go_on_from()) == (1, 1, [])


def test_what_passed_unread_counts_when_somebody_asks() -> None:
    tokens = StreamTokens(5)
    tokens.add_unread(EVENT % b"1" + EVENT % b"2,3")
    assert (tokens.count, tokens.arrived) == (0, True)
    tokens.read_up()
    tokens.read_up()
    assert (tokens.count, tokens.to_go_on_from(), tokens.unread) == (3, [1, 2, 3], [])


@pytest.mark.parametrize("attempt", [0, 1, 31, 32, 1000])
def test_and_in_any_case_before_it_is_much(attempt: int) -> None:
    tokens = StreamTokens(attempt)
    most = 0
    for number in range(3 * READ_TOGETHER):
        tokens.add_unread(EVENT % b"7")
        most = max(most, len(tokens.unread))
        assert tokens.count + len(tokens.unread) == number + 1
    assert most < READ_TOGETHER
    assert tokens.count >= 2 * READ_TOGETHER


def test_streams_that_began_together_count_at_different_times() -> None:
    streams = [StreamTokens(attempt) for attempt in range(READ_TOGETHER)]
    counted = []
    for _ in range(READ_TOGETHER):
        before = [stream.count for stream in streams]
        for stream in streams:
            stream.add_unread(EVENT % b"7")
        counted.append(sum(s.count > b for s, b in zip(streams, before, strict=True)))
    assert max(counted) <= 2


@pytest.mark.parametrize(
    ("data", "ids", "events"),
    [
        (b'{"token_ids" : [1, 2]}', [1, 2], 0),
        (b'{"token_ids":[1]}{"token_ids" :[2]}', [1, 2], 0),
        (EVENT % b"" + EVENT % b"1, 2", [1, 2], 0),
        (EVENT % b"1" + b'data: {"choices":[{"token_ids" : [],"text":"a"}]}\n\n', [1], 1),
        (b'data: {"choices":[{"token_ids":[],"delta":{"role":"assistant"}}]}\n\n', [], 0),
        (b'data: {"choices":[{"token_ids":[]}\n\n', [], 1),
        (b'{"token_ids":["x"]}', [], 1),
        (b'{"choices":[]}{"choices":[]}', [], 2),
    ],
)
def test_ids_however_they_are_written(data: bytes, ids: list[int], events: int) -> None:
    tokens = StreamTokens(1)
    tokens.add_unread(data)
    tokens.read_up()
    assert (tokens.to_go_on_from(), tokens.events) == (ids, events)
