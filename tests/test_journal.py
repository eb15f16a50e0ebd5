"""The journal: what is written can be read, what is damaged is named, what is replayed is equal."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from rollout_sched import journal
from rollout_sched.config import PolicyFile, load_policy, shipped
from rollout_sched.core.model import events as ev
from rollout_sched.journal import (
    SCHEMA,
    Entry,
    JournalError,
    JournalHeader,
    JournalWriter,
    read,
    replay,
)
from tests.core.model.test_events import STATE
from tests.core.told import facts
from tests.helpers import make_policy, make_scenario, make_trace, watch

HEADER = JournalHeader(SCHEMA, "sync", 4, 2, 7)
EVENTS: list[ev.Event] = [
    ev.InstanceJoined("i0", 8, 4096, 2),
    ev.GroupSubmitted("a", 2, 10, 100),
    ev.RequestSubmitted("d1", "p", 10, 100, "s"),
    ev.RequestWithdrawn("d1"),
    ev.RequestAborted("d1"),
    ev.SessionEnded("s"),
    ev.SubmissionsClosed(),
    ev.InstanceReturned("i0"),
    ev.BatchRequested(),
    ev.TokensArrived("a/0", 1, 3),
    ev.InstanceReported("i0", 1, 0, 0.25, preemptions=1, generated_tokens=9),
    ev.TurnFinished("a/0", 1, 5, ((2, 5),)),
    ev.ToolReturned("a/0", 1, 4),
    ev.TrajectoryEnded("a/0", 2, "length"),
    ev.RequestInterrupted("a/1", 2, 7, ((2, 3), (3, 4))),
    ev.RequestFailed("a/1", 3, "reset by peer", blame="request"),
    ev.RequestFinished("a/0", 4, 1, (), "length"),
    ev.WeightsPublished(3),
    ev.InstancePaused("i0"),
    ev.WeightsUpdated("i0", 3),
    ev.InstanceReturned("i0"),
    ev.Woke(),
    ev.GateClosed("i0"),
    ev.GateOpened("i0"),
    ev.InstanceLeaving("i0"),
    ev.InstanceLost("i0", "gone"),
    ev.Restored(STATE),
    ev.GroupJudged("g", 1, "kept"),
]


def write(path: Path, events: list[ev.Event] = EVENTS) -> Path:
    with closing(JournalWriter(path, HEADER)) as writer:
        for number, event in enumerate(events):
            writer.record(number / 3, event)
    return path


def test_round_trip_of_every_kind_of_event(tmp_path: Path) -> None:
    header, entries = read(write(tmp_path / "j.jsonl"))
    assert header == HEADER
    assert list(entries) == [Entry(number / 3, event) for number, event in enumerate(EVENTS)]
    assert {type(event) for event in EVENTS} == set(ev.Event.__args__)


def test_a_journal_of_nothing(tmp_path: Path) -> None:
    header, entries = read(write(tmp_path / "j.jsonl", []))
    assert header == HEADER
    assert not list(entries)


class TestDamage:
    def entries_until_error(self, path: Path) -> tuple[int, str]:
        _, entries = read(path)
        good = 0
        try:
            for _ in entries:
                good += 1
        except JournalError as error:
            return good, str(error)
        pytest.fail("nothing was found wrong")

    @pytest.mark.parametrize("cut", [2, 10, 40])
    def test_a_last_line_that_was_cut_is_the_end_and_said(
        self, tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A crash, or a full disk, in the middle of a write."""
        path = write(tmp_path / "j.jsonl")
        path.write_bytes(path.read_bytes()[:-cut])
        _, entries = read(path)
        assert [entry.event for entry in entries] == EVENTS[:-1]
        assert f"{path}:{len(EVENTS) + 1}: cut in the middle" in caplog.text

    def test_a_last_line_without_its_end_is_whole(self, tmp_path: Path) -> None:
        path = write(tmp_path / "j.jsonl")
        path.write_bytes(path.read_bytes()[:-1])
        _, entries = read(path)
        assert [entry.event for entry in entries] == EVENTS

    def test_a_last_line_that_is_whole_but_wrong(self, tmp_path: Path) -> None:
        path = write(tmp_path / "j.jsonl")
        path.write_bytes(path.read_bytes() + b"what?\n")
        good, text = self.entries_until_error(path)
        assert good == len(EVENTS)
        assert text.startswith(f"{path}:{len(EVENTS) + 2}: not a journal line")

    @pytest.mark.parametrize(
        "line",
        [
            b"what?",
            b"{}",
            b'{"now": 1.0, "event": {"type": "Surprise"}}',
            b'{"now": "late", "event": {"type": "Woke"}}',
            b'{"now": 1.0, "event": {"type": "InstanceLost"}}',
            b"",
        ],
    )
    def test_malformed_line(self, tmp_path: Path, line: bytes) -> None:
        path = write(tmp_path / "j.jsonl")
        lines = path.read_bytes().splitlines()
        lines[5] = line
        path.write_bytes(b"\n".join(lines))
        good, text = self.entries_until_error(path)
        assert good == 4
        assert text.startswith(f"{path}:6: not a journal line")

    @pytest.mark.parametrize(
        "content", [b"", b"\n", b"not json\n", b'{"schema": "rollout-sched-journal/2"}\n']
    )
    def test_no_header(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "j.jsonl"
        path.write_bytes(content)
        with pytest.raises(JournalError, match=r"j\.jsonl:1: not a journal line"):
            read(path)

    def test_wrong_schema(self, tmp_path: Path) -> None:
        path = tmp_path / "j.jsonl"
        path.write_bytes(
            msgspec.json.encode(JournalHeader("rollout-sched-journal/1", "p", 1)) + b"\n"
        )
        with pytest.raises(
            JournalError, match=r":1: schema is 'rollout-sched-journal/1'.*/2'.*wrote"
        ):
            read(path)

    def test_missing_file_is_the_system_s_error(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "none.jsonl")


# -- replaying -----------------------------------------------------------------------------------


TRACE = make_trace({f"g{i}": [3 + 7 * i % 11, 2 + i, 1 + 5 * i % 17] for i in range(9)})
SCENARIO = make_scenario(
    instances=3, slots=3, train_s=4, prompts_per_step=2, poll_s=3.0, stream_s=2.0
)
DICE = make_policy(
    "dice",
    routing="power_of_two",
    prediction={"use": "group_history", "method": "censored"},
    ordering="longest_first",
    batching="fully_async",
    freshness={"max_staleness": 2},
    interruption={"use": "partial", "at_update": "resubmit"},
)


POLICIES = [load_policy(name) for name in shipped("policies/presets")] + [DICE]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_replay_gives_the_same_actions_and_the_same_state(
    policy: PolicyFile, tmp_path: Path
) -> None:
    ran = watch(policy, TRACE, SCENARIO, seed=5, check=False)
    path = tmp_path / "j.jsonl"
    with closing(JournalWriter(path, JournalHeader(SCHEMA, policy.name, 2, 0, 5))) as writer:
        for now, event, _ in ran.log:
            writer.record(now, event)

    header, entries = journal.read(path)
    fresh = policy.scheduler(header.prompts_per_step, version=header.version, seed=header.seed)
    answers = [actions for _, actions in replay(fresh, entries)]
    assert answers == [actions for _, _, actions in ran.log]
    assert facts(fresh) == facts(ran.scheduler)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_recovery_in_the_middle_of_a_run(policy: PolicyFile) -> None:
    """A scheduler that read half the journal goes on as if nothing had happened."""
    ran = watch(policy, TRACE, SCENARIO, seed=1, check=False)
    entries = [Entry(now, event) for now, event, _ in ran.log]
    half = len(entries) // 2
    recovered, steady = (policy.scheduler(2, seed=1) for _ in range(2))
    for entry in entries[:half]:
        steady.handle(entry.event, entry.now)
    list(replay(recovered, entries[:half]))
    assert facts(recovered) == facts(steady)
    assert recovered.state.groups
    rest = [actions for _, actions in replay(recovered, entries[half:])]
    assert rest == [actions for _, _, actions in ran.log[half:]]


def test_another_seed_is_another_run() -> None:
    ran = watch(DICE, TRACE, SCENARIO, seed=1, check=False)
    other = DICE.scheduler(2, seed=2)
    entries = [Entry(now, event) for now, event, _ in ran.log[:40]]
    answers = [actions for _, actions in replay(other, entries)]
    assert answers != [actions for _, _, actions in ran.log[:40]]
