"""The facts of a run survive JSON, and a group may be taken back to what was asked for."""

from __future__ import annotations

import msgspec
import pytest

from rollout_sched.core.rounds import DeliveredGroup, Launch
from rollout_sched.core.run_state import (
    GroupFacts,
    PromptFacts,
    RequestFacts,
    RunFacts,
    RunState,
)
from rollout_sched.core.samples import Segment

SEGMENTS = (Segment(1, 4, "i0"), Segment(2, 3, "i1", verified=True))
GROUP = GroupFacts(
    "a",
    1,
    2,
    10,
    100,
    "p",
    5,
    history=((3, 9),),
    state="deferred",
    started=True,
    oldest_version=1,
    launch_place=2,
    launch_size=3,
    finished=(1,),
    requests=(
        RequestFacts(0, 2, "parked", SEGMENTS, observed_tokens=6, salt=1),
        RequestFacts(1, 3, "finished", finish="stop"),
    ),
)


def test_it_survives_json() -> None:
    run = RunFacts(now=7.5, version=2, round=Launch(2, 1, 1.25), whole_at=1)
    state = RunState(run, (GROUP,), (PromptFacts("p", ((1, 2), (3,))),), (DeliveredGroup(4, (5,)),))
    assert msgspec.json.decode(msgspec.json.encode(state), type=RunState) == state


def test_a_request_has_the_tokens_of_its_segments() -> None:
    assert [request.response_tokens for request in GROUP.requests] == [7, 0]


def test_a_group_without_its_tokens_is_as_it_was_submitted() -> None:
    assert GROUP.anew() == GroupFacts("a", 1, 2, 10, 100, "p", 5, history=((3, 9),))


def test_a_state_that_no_group_has_is_refused() -> None:
    line = msgspec.json.encode(GROUP).replace(b"deferred", b"lost")
    with pytest.raises(msgspec.ValidationError, match="lost"):
        msgspec.json.decode(line, type=GroupFacts)
