"""Events: every kind survives the wire, cannot be changed, and goes by its name."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from rollout_sched.core import events as ev
from tests.core.told import make_scheduler

EVENTS: list[ev.Event] = [
    ev.InstanceJoined("i0", 8, 4096, 2),
    ev.InstanceLost("i0", "gone"),
    ev.InstanceLeaving("i0"),
    ev.InstanceReported("i0", 1, 2, 0.25, 3, 4, 5, 6, 7),
    ev.GroupSubmitted("a", 2, 10, 100),
    ev.RequestSubmitted("d1", "p", 10, 100, "s"),
    ev.RequestWithdrawn("d1"),
    ev.SessionEnded("s"),
    ev.SubmissionsClosed(),
    ev.TokensArrived("a/0", 1, 3),
    ev.RequestFinished("a/0", 4, 7, ((2, 3), (3, 4)), "length"),
    ev.TurnFinished("a/0", 1, 5, ((2, 5),)),
    ev.ToolReturned("a/0", 1, 4),
    ev.TrajectoryEnded("a/0", 1, "failed"),
    ev.RequestInterrupted("a/1", 2, 7, ((2, 3), (3, 4))),
    ev.RequestFailed("a/1", 3, "reset by peer", blame="request"),
    ev.WeightsPublished(3),
    ev.InstancePaused("i0"),
    ev.WeightsUpdated("i0", 3),
    ev.BatchRequested(),
    ev.Woke(),
]

every_event = pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)


def test_every_kind_is_here() -> None:
    assert [type(event) for event in EVENTS] == list(get_args(ev.Event))


@every_event
def test_json_round_trip(event: ev.Event) -> None:
    decoded = msgspec.json.decode(msgspec.json.encode(event), type=ev.Event)
    assert type(decoded) is type(event)
    assert decoded == event


@every_event
def test_the_tag_is_the_name_of_the_class(event: ev.Event) -> None:
    assert msgspec.to_builtins(event)["type"] == type(event).__name__


@every_event
def test_a_fact_cannot_be_changed(event: ev.Event) -> None:
    for field in event.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(event, field, getattr(event, field))
    assert hash(event) == hash(msgspec.structs.replace(event))


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (
            b'{"type": "RequestFinished", "request": "a/0", "attempt": 1, "tokens": 3}',
            ev.RequestFinished("a/0", 1, 3, (), "stop"),
        ),
        (
            b'{"type": "RequestFailed", "request": "a/0", "attempt": 1}',
            ev.RequestFailed("a/0", 1, "", blame="unclear"),
        ),
        (
            b'{"type": "InstanceJoined", "instance": "i0", "slots": 8, "kv_tokens": 9}',
            ev.InstanceJoined("i0", 8, 9, 0),
        ),
    ],
)
def test_what_may_be_left_out(said: bytes, meant: ev.Event) -> None:
    assert msgspec.json.decode(said, type=ev.Event) == meant


@pytest.mark.parametrize(
    "said",
    [
        b'{"type": "RequestFinished", "request": "a/0", "attempt": 1, "tokens": 3, "reason": "?"}',
        b'{"type": "RequestFinished", "request": "a/0", "tokens": 3}',
        b'{"type": "WeightsPublished", "version": "3"}',
        b'{"type": "Surprise"}',
    ],
)
def test_what_no_world_says(said: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(said, type=ev.Event)


def test_the_scheduler_has_an_answer_for_every_kind() -> None:
    scheduler = make_scheduler(version=2)
    for event in EVENTS:
        scheduler.handle(event, 0.0)
