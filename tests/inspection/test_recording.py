"""Journals are told again as they were recorded, and mistakes are named."""

from __future__ import annotations

import gzip
import logging
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model import events as ev
from rollout_sched.core.model.actions import Action, Answer, Deliver
from rollout_sched.core.model.events import Event
from rollout_sched.core.model.records import DeliveredSample, Segment
from rollout_sched.inspection.recording import Recording, rows, summary
from rollout_sched.inspection.trace_fold import TraceFold, recorded_trace
from rollout_sched.journal import JournalError
from rollout_sched.metrics.fold import Folded
from rollout_sched.simulators import traces
from rollout_sched.simulators.replay.faults import Lost, SchedulerRestarts
from rollout_sched.simulators.replay.scenario import Job, TrafficModel
from rollout_sched.simulators.traces import Trace, TraceError
from tests.inspection.journals import recorded


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "j.jsonl"
    recorded(path, "dplb", groups=4)
    return path


def count(recording: Recording) -> int:
    events = []
    recording.tell([lambda now, event, actions: events.append(event)])
    return len(events)


def test_every_event_is_told_with_its_actions(path: Path) -> None:
    assert count(Recording(path)) == len(path.read_text().splitlines()) - 1


def test_gzip_is_read_as_it_is(path: Path, tmp_path: Path) -> None:
    zipped = tmp_path / "j.gz"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    assert count(Recording(zipped)) == count(Recording(path))


def test_a_damaged_gzip_is_named(path: Path, tmp_path: Path) -> None:
    zipped = tmp_path / "j.gz"
    zipped.write_bytes(gzip.compress(path.read_bytes())[:-20])
    with pytest.raises(JournalError, match=r"j\.gz: its gzip stream is damaged"):
        count(Recording(zipped))


def test_open_journal_ends_with_its_last_complete_line(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = count(Recording(path))
    path.write_bytes(path.read_bytes()[:-5])
    with caplog.at_level(logging.WARNING):
        assert count(Recording(path)) == whole - 1
    assert "cut in the middle" in caplog.text


def test_a_policy_of_the_users_own_is_in_the_journal(tmp_path: Path) -> None:
    path, mine = tmp_path / "j.jsonl", tmp_path / "mine.toml"
    mine.write_text('[migration]\nuse = "tests.helpers:Restless"\ninterval_s = 3.0\n')
    recorded(path, str(mine), groups=4, allow_code=True)
    with pytest.raises(CallerError, match=r"mine: migration.use: .* is code.*--allow-code"):
        Recording(path)
    whole = count(Recording(path, allow_code=True))
    mine.write_text("[batching]\nuse = 'one_step_off'\n[freshness]\nmax_staleness = 1\n")
    recorded(path, str(mine), groups=4)
    mine.unlink()
    assert count(Recording(path)) > 0 < whole


def test_refused_event_is_named_with_its_line(path: Path) -> None:
    lines = path.read_text().splitlines()
    place = next(n for n, line in enumerate(lines) if "GroupSubmitted" in line)
    path.write_text("\n".join([*lines[: place + 1], *lines[place:]]) + "\n")
    refused = rf"j\.jsonl:{place + 2}: the scheduler refuses this event"
    with pytest.raises(JournalError, match=refused):
        Recording(path).tell([])


def test_journal_of_several_schedulers_is_read_by_as_many(tmp_path: Path) -> None:
    """Of a run that went on after its scheduler had died, each journal line by its own."""
    path = tmp_path / "j.jsonl"
    faults = (SchedulerRestarts(at_s=2.0), SchedulerRestarts(at_s=9.0))
    _, run = recorded(path, "dplb", groups=4, faults=faults)
    samples = 0

    def deliver(now: float, event: Event, actions: Iterable[Action]) -> None:
        nonlocal samples
        samples += sum(len(action.samples) for action in actions if isinstance(action, Deliver))

    Recording(path).tell([deliver])
    assert samples == run.summary.samples_delivered > 0


def told(*paths: Path) -> tuple[Trace, list[str]]:
    return recorded_trace("again", [Recording(path) for path in paths])


@pytest.mark.parametrize("policy", ["dplb", "areal", "partial_rollout", "best_on_policy"])
def test_trajectories_come_back_turn_by_turn(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "j.jsonl"
    offered, _ = recorded(path, policy)
    found, lacks = told(path)
    assert not lacks
    assert found.groups.keys() == offered.groups.keys()
    for group, samples in offered.groups.items():
        for was, now in zip(samples, found.groups[group], strict=True):
            assert now.prompt_tokens == max(sample.prompt_tokens for sample in samples)
            assert now.finish == was.finish
            assert len(now.turns) == len(was.turns)
            for before, after in zip(was.turns, now.turns, strict=True):
                assert after.output_tokens == before.output_tokens
                assert after.observation_tokens == before.observation_tokens
                assert after.tool_s == pytest.approx(before.tool_s)


def test_no_response_that_was_begun_is_lost(tmp_path: Path) -> None:
    """Those that were cut, or took the place of a cut one, tell of the lengths as others do:
    without them, the shorter ones that took no place would be too many."""
    path = tmp_path / "j.jsonl"
    job = Job(prompts_per_step=4)  # a response that starts over has another length
    recorded(path, "tail_batching", "lrm_math_open", groups=16, job=job)
    events = Recording(path).events()
    ends = [one for _, one in events if isinstance(one, ev.RequestFinished | ev.RequestInterrupted)]
    made = Counter([end.tokens for end in ends if end.tokens])
    found, _ = told(path)
    assert Counter([sample.response_tokens for sample in found.samples()]) == made
    assert sum(isinstance(end, ev.RequestInterrupted) for end in ends) > 10


def test_samples_are_cut_by_the_end_of_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    offered, _ = recorded(path, "dplb")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) // 2]))
    found, [lacks] = told(path)
    assert list(found.groups) == list(offered.groups)[: len(found.groups)]
    assert lacks == f"{12 - len(found.groups)} groups of which nothing was started"
    finishes = Counter(sample.finish for sample in found.samples())
    assert finishes["stop"] > 0 < finishes["cut"]
    path.write_text("".join(lines[:5]))
    with pytest.raises(TraceError):
        told(path)


@pytest.mark.parametrize("policy", ["dplb", "areal", "tail_batching"])
def test_any_part_of_a_run_gives_a_trace(tmp_path: Path, policy: str) -> None:
    """Lengths are exact or cut, and what is missing is named."""
    path, late, apart = (tmp_path / name for name in ("j.jsonl", "late.gz", "apart.jsonl"))
    spread = {
        group: [msgspec.structs.replace(sample, arrival_s=9.0 * number) for sample in members]
        for number, (group, members) in enumerate(traces.read("lrm_math_open").groups.items())
    }
    traces.write(Trace("apart", spread), apart)
    offered, _ = recorded(path, policy, trace=str(apart), groups=24)
    header, *lines = path.read_text().splitlines(keepends=True)
    part = header.replace("{", '{"part":2,', 1)
    late.write_bytes(gzip.compress("".join([part, *lines[len(lines) // 4 :]]).encode()))
    with pytest.raises(JournalError, match="begins in the middle of a run"):
        Recording(late).tell([])
    found, lacks = told(late)
    assert lacks[0] == f"the events before {late}"
    assert re.match(r"\d+ groups and requests that were submitted before it", lacks[1])
    truth = {(s.group, s.sample): s.response_tokens for s in offered.samples()}
    exact = 0
    for sample in found.samples():
        length = truth.get((sample.group, sample.sample), sample.response_tokens)
        assert sample.response_tokens <= length
        assert sample.finish == "cut" or sample.response_tokens == length
        exact += sample.finish != "cut"
    assert exact > 10


def test_the_journals_of_a_restarted_run_are_one(tmp_path: Path) -> None:
    """Also if the first one is missing: the second begins with the state."""
    path, first, second = (tmp_path / name for name in ("j.jsonl", "1.jsonl", "2.jsonl"))
    offered, _ = recorded(path, "dplb", groups=8, faults=(SchedulerRestarts(at_s=24.0),))
    header, *lines = path.read_text().splitlines(keepends=True)
    [at] = [number for number, line in enumerate(lines) if '"Restored"' in line]
    first.write_text("".join([header, *lines[:at]]))
    second.write_text("".join([header, *lines[at:]]))
    whole, _ = told(path)
    assert told(first, second) == told(second, first) == (whole, [])
    assert whole.groups.keys() == offered.groups.keys()
    rest, _ = told(second)
    assert 0 < len(rest.groups) < 8
    assert {sample.finish for sample in rest.samples()} == {"stop"}


def test_a_client_s_request_is_a_sample_of_the_group_it_named() -> None:
    fold = TraceFold("here", [])
    folded = Folded(fold)
    for number, group in enumerate(("a", "a", "")):
        request = f"r{number}"
        made = DeliveredSample(request, group, 0, 9, 4, (Segment(3, 4, "i"),), 0, "length")
        folded.observe(7.0 + number, ev.RequestSubmitted(request, group, 9, 4), ())
        folded.observe(9.0 + number, ev.Woke(), [Answer(made)])
    groups = fold.trace("clients")[0].groups
    assert {name: len(members) for name, members in groups.items()} == {"a": 2, "r2": 1}
    [first, second] = groups["a"]
    assert (first.arrival_s, second.arrival_s) == (0.0, 1.0)
    assert (first.version, first.finish, first.response_tokens) == (3, "length", 4)


# ------------------------------------------------------------------------------------------
# A journal's figures are those of the run that wrote it.


@pytest.mark.parametrize("policy", ["dplb", "areal", "partial_rollout"])
def test_the_figures_of_the_replay(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "j.jsonl"
    _, run = recorded(path, policy)
    found = summary(Recording(path))
    assert found["policy"] == policy
    assert found["samples_delivered"] == run.summary.samples_delivered
    assert found["discarded_tokens"] == run.summary.discarded_tokens
    assert found["staleness_max"] == run.summary.staleness_max
    assert found["idle_bubble_by_cause"]["barrier"] > 0
    assert len(found["per_step"]) == len(run.steps)
    assert found["total_s"] <= run.summary.total_s


def test_clients_and_outages(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    _, run = recorded(
        path,
        "dplb",
        traffic=TrafficModel(rate=0.2, for_s=60.0),
        faults=(Lost(at_s=9.0, instance=1),),
    )
    found = summary(Recording(path))
    assert found["direct"]["answered"] == run.direct.answered > 0
    assert found["outages"]["instances_lost"] == 1


def test_rows(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    recorded(path, "areal")
    found = summary(Recording(path))
    shown = dict(rows(found))
    assert shown["samples delivered"] == "48"
    assert "  answered" not in shown, "nobody asked for a response by itself"
    found["direct"] = {**found["direct"], "submitted": 3, "answered": 2}
    assert dict(rows(found))["  answered"] == "2"
