"""What is handed out: frozen, compared by value, and the same after JSON."""

from __future__ import annotations

import msgspec
import pytest

from rollout_sched.core.model.records import (
    DeliveredGroup,
    DeliveredSample,
    GroupFacts,
    GroupStands,
    Launch,
    PromptFacts,
    RequestFacts,
    RunFacts,
    RunState,
    Segment,
)
from rollout_sched.core.model.request_ids import IdCounter

SAMPLE = DeliveredSample(
    "a/0", "a", 0, 10, 7, (Segment(3, 4, "i0"), Segment(4, 3, "i1")), 1, "stop"
)


def test_records_are_frozen_and_compared_by_value() -> None:
    assert Segment(3, 4, "i0") == SAMPLE.segments[0]
    assert msgspec.structs.replace(SAMPLE) == SAMPLE
    for thing, field in [(SAMPLE.segments[0], "tokens"), (SAMPLE, "staleness")]:
        with pytest.raises(AttributeError):
            setattr(thing, field, 99)


def test_a_sample_survives_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(SAMPLE), type=DeliveredSample) == SAMPLE


@pytest.mark.parametrize("what", [Launch(3, 1, 1.5), DeliveredGroup(10, (4, 7))])
def test_it_survives_json(what: Launch | DeliveredGroup) -> None:
    assert msgspec.json.decode(msgspec.json.encode(what), type=type(what)) == what


SEGMENTS = (Segment(1, 4, "i0"), Segment(2, 3, "i1", masked=True))
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


def test_run_state_it_survives_json() -> None:
    run = RunFacts(now=7.5, version=2, round=Launch(2, 1, 1.25), whole_at=1)
    state = RunState(run, (GROUP,), (PromptFacts("p", ((1, 2), (3,))),), (DeliveredGroup(4, (5,)),))
    assert msgspec.json.decode(msgspec.json.encode(state), type=RunState) == state


def test_a_request_has_the_tokens_of_its_segments() -> None:
    assert [request.response_tokens for request in GROUP.requests] == [7, 0]


def test_a_group_without_its_tokens_is_as_it_was_submitted() -> None:
    assert GROUP.as_submitted() == GroupFacts("a", 1, 2, 10, 100, "p", 5, history=((3, 9),))


def test_a_state_that_no_group_has_is_refused() -> None:
    line = msgspec.json.encode(GROUP).replace(b"deferred", b"lost")
    with pytest.raises(msgspec.ValidationError, match="lost"):
        msgspec.json.decode(line, type=GroupFacts)


def test_round_losses_are_counted():
    run = RunFacts(round=Launch(4), lost=1)
    written = [group("a", 1, "active"), group("b", 2, "complete"), group("c", 3, "spent")]
    assert run.after_losses(written, written) == run
    assert run.after_losses(written, written[1:]).lost == 2
    assert run.after_losses(written, [written[0].as_submitted(), written[1]]).lost == 2
    assert RunFacts().after_losses(written, []).lost == 0


def test_window_drops_lost_groups_and_gets_restarted_ones():
    run = RunFacts(window=2)
    active, *fresh = written = [
        group("a", 1, "active"),
        group("b", 2, "fresh"),
        group("c", 3, "fresh"),
        group("d", 4, "fresh"),
    ]
    assert run.after_losses(written, written).window == 2
    assert run.after_losses(written, [active, *fresh[1:]]).window == 1
    assert run.after_losses(written, [active, *fresh[:2]]).window == 2
    assert run.after_losses(written, [active.as_submitted(), *fresh]).window == 3
    assert RunFacts().after_losses(written, [active.as_submitted(), *fresh]).window == 0


def group(name: str, serial: int, state: GroupStands) -> GroupFacts:
    return GroupFacts(name, serial, 1, 3, 9, name, state=state)


def test_they_count_from_one_and_go_on_from_the_last() -> None:
    serials = IdCounter()
    assert [serials.next(), serials.next()] == [1, 2]
    serials.last = 41
    assert serials.next() == 42
