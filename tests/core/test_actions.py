"""Actions: every kind survives the wire, cannot be changed, and goes by its name."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from rollout_sched.core import actions as act
from rollout_sched.core.model import Sample, Segment

SAMPLE = Sample("a/0", "a", 0, 10, 7, (Segment(3, 4, "i0"), Segment(4, 3, "i1")), 1, "length")
ACTIONS: list[act.Action] = [
    act.Dispatch("a/0", 1, "i0", 10, 100, 3, 4, 5, 6),
    act.Interrupt("a/0", 1, "i0"),
    act.Pause("i0", "keep", clear_cache=True),
    act.UpdateWeights("i0", 3),
    act.Resume("i0"),
    act.Release("i0"),
    act.Deliver(2, 4, (SAMPLE,)),
    act.Answer(SAMPLE),
    act.Discard("a/0", 7, "stale", ends=True, attempt=3),
    act.Wake(1.5),
]

every_action = pytest.mark.parametrize("action", ACTIONS, ids=lambda action: type(action).__name__)


def test_every_kind_is_here() -> None:
    assert [type(action) for action in ACTIONS] == list(get_args(act.Action))


@every_action
def test_json_round_trip(action: act.Action) -> None:
    decoded = msgspec.json.decode(msgspec.json.encode(action), type=act.Action)
    assert type(decoded) is type(action)
    assert decoded == action


@every_action
def test_the_tag_is_the_name_of_the_class(action: act.Action) -> None:
    assert msgspec.to_builtins(action)["type"] == type(action).__name__


@every_action
def test_an_order_cannot_be_changed(action: act.Action) -> None:
    for field in action.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(action, field, getattr(action, field))
    assert hash(action) == hash(msgspec.structs.replace(action))


def test_an_instance_is_paused_in_two_ways_only() -> None:
    said = b'{"type": "Pause", "instance": "i0", "mode": "kill", "clear_cache": true}'
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(said, type=act.Action)


def test_a_discard_does_not_end_a_request_unless_it_says_so() -> None:
    assert act.Discard("a/0", 7, "surplus").ends is False
