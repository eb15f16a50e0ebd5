"""Events: a journal of an earlier version is read, and every event has somebody who handles it."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from rollout_sched.core.model import events as ev
from rollout_sched.core.model.records import (
    DeliveredGroup,
    GroupFacts,
    Launch,
    PromptFacts,
    RequestFacts,
    RunFacts,
    RunState,
    Segment,
)
from rollout_sched.journal import SCHEMA, Entry, JournalHeader, line_of, read
from tests.core.told import make_scheduler

#: Journals as they were once written. Where a test below fails for them, journals that users keep
#: cannot be read any more: give what is new a default, or raise `journal.SCHEMA` and add a file.
RECORDED = Path(__file__).with_name("recorded")

HEADER = JournalHeader(SCHEMA, "sync", 4, 2, 7)

#: A run that has come so far, with something in every field.
STATE = RunState(
    RunFacts(
        9.5,
        3,
        False,
        True,
        True,
        True,
        True,
        4,
        2,
        1,
        1,
        2,
        Launch(2, 1, 1.5),
        1,
        40,
        9,
        3,
        64,
    ),
    (
        GroupFacts(
            "b",
            5,
            2,
            10,
            100,
            "p",
            50,
            ((7, 9),),
            "active",
            True,
            2,
            1,
            2,
            (1,),
            (
                RequestFacts(
                    0,
                    6,
                    "acting",
                    (Segment(2, 4, "i0"),),
                    3,
                    17,
                    1,
                    "",
                    2,
                    8,
                    "i0",
                    1,
                ),
                RequestFacts(1, 7, "finished", (Segment(3, 5, "i1"),), finish="stop"),
            ),
        ),
    ),
    (PromptFacts("p", ((1, 2), (3,))),),
    (DeliveredGroup(10, (4, 7)),),
)

#: All that an event may say.
WHOLE: list[ev.Event] = [
    ev.InstanceJoined("i0", 8, 4096, 2),
    ev.InstanceLost("i0", "gone"),
    ev.InstanceLeaving("i0"),
    ev.InstanceReported("i0", 1, 2, 0.25, 3, 4, 5, 6, 7),
    ev.GroupSubmitted("a", 2, 10, 100, "p", (7, 9), 50),
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
    ev.RequestFailed("a/1", 3, "reset by peer", blame="request", usable=False),
    ev.WeightsPublished(3),
    ev.InstancePaused("i0"),
    ev.WeightsUpdated("i0", 3),
    ev.InstanceReturned("i0"),
    ev.BatchRequested(parts=True, shares_gpus=True),
    ev.Woke(),
    ev.Restored(STATE),
    ev.GateClosed("i0"),
    ev.GateOpened("i0"),
    ev.GroupJudged("a", 3, "filtered"),
    ev.RequestAborted("d1"),
]

#: What an event means that says only what it must.
SHORT: list[ev.Event] = [
    ev.InstanceJoined("i0", 8, 4096, 0),
    ev.InstanceLost("i0", ""),
    ev.InstanceReported("i0", 1, 2, 0.25, 0, 0, 0, 0, 0),
    ev.GroupSubmitted("a", 2, 10, 100, "", (), 0),
    ev.RequestSubmitted("d1", "p", 10, 100, ""),
    ev.RequestFinished("a/0", 4, 7, (), "stop"),
    ev.TurnFinished("a/0", 1, 5, ()),
    ev.TrajectoryEnded("a/0", 1, "stop"),
    ev.RequestInterrupted("a/1", 2, 7, ()),
    ev.RequestFailed("a/1", 3, "", blame="unclear", usable=True),
    ev.BatchRequested(False),
    ev.Restored(RunState()),
]


def entries(events: list[ev.Event]) -> list[Entry]:
    return [Entry(number / 4, event) for number, event in enumerate(events)]


def test_every_kind_is_recorded() -> None:
    assert {type(event) for event in WHOLE} == set(get_args(ev.Event))


def test_recorded_journal_is_read_unchanged() -> None:
    header, read_entries = read(RECORDED / "journal_2.jsonl")
    assert header == HEADER
    assert list(read_entries) == entries(WHOLE)


def test_omitted_fields_keep_their_defaults() -> None:
    _, read_entries = read(RECORDED / "journal_2_short.jsonl")
    assert list(read_entries) == entries(SHORT)


def test_written_journal_equals_the_recorded_one() -> None:
    """Byte for byte: what is new in a line would be ignored, or missed, by an earlier version."""
    lines = [line_of(HEADER), *(line_of(entry) for entry in entries(WHOLE))]
    assert b"".join(lines) == (RECORDED / "journal_2.jsonl").read_bytes()


def test_the_scheduler_has_an_answer_for_every_kind() -> None:
    scheduler = make_scheduler(version=2)
    for event in WHOLE:
        # What is restored comes before all others.
        restored = isinstance(event, ev.Restored)
        (make_scheduler(2) if restored else scheduler).handle(event, 10.0)
