"""Law: whatever of a run's journals is left gives a trace of what it shows, or an error that names
the file.

Left is a file from any event on, to any byte, as it is or compressed; or the files of a gateway
that was restarted, of which the first has lost its last lines. No group is in the trace twice, none
that was not submitted, and no sample is longer than it really was.
"""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from rollout_sched.config import load_policy
from rollout_sched.core.errors import CallerError
from rollout_sched.inspection import recorded_trace
from rollout_sched.inspection.recording import Recording
from rollout_sched.simulators import traces
from rollout_sched.simulators.replay.faults import SchedulerRestarts
from rollout_sched.simulators.replay.runs import run_policy
from rollout_sched.simulators.replay.scenario import Job, load_scenario
from rollout_sched.simulators.traces import Trace, TraceError

POLICIES = ("dplb", "areal", "partial_rollout", "tail_batching")
GROUPS = 16


def offered() -> Trace:
    """Groups that come one after the other, so that parts of a run see some of them only."""
    groups = list(traces.read("lrm_math_open").groups.items())[:GROUPS]
    spread = {
        group: [msgspec.structs.replace(sample, arrival_s=9.0 * number) for sample in members]
        for number, (group, members) in enumerate(groups)
    }
    return Trace("apart", spread)


@cache
def journal(policy: str, restart_s: float = 0.0) -> list[bytes]:
    """Its lines; a sample that starts over has the same length again."""
    scenario = load_scenario("qwen7b-8xh100-disaggregated")
    faults = (SchedulerRestarts(at_s=restart_s),) if restart_s else ()
    job = Job(prompts_per_step=4, redraws=False)
    scenario = msgspec.structs.replace(scenario, job=job, faults=faults)
    with TemporaryDirectory() as folder:
        path = Path(folder, "j")
        run_policy(load_policy(policy), offered(), scenario, journal_path=path)
        return path.read_bytes().splitlines(keepends=True)


def traced(*files: bytes) -> tuple[Trace, list[str]] | None:
    """None if there is nothing in it, which an error says with the name of the file."""
    with TemporaryDirectory() as folder:
        paths = [Path(folder, f"part{number}") for number in range(len(files))]
        for path, content in zip(paths, files, strict=True):
            path.write_bytes(content)
        try:
            return recorded_trace("again", [Recording(path) for path in paths])
        except (CallerError, TraceError) as error:
            said = str(error)
    assert folder in said
    return None


def check(found: Trace) -> None:
    truth = offered()
    assert list(found.groups) == [name for name in truth.groups if name in found.groups]
    size = truth.group_size
    lengths = {(s.group, s.sample): s.response_tokens for s in truth.samples()}
    for sample in found.samples():
        if sample.sample < size:  # others were added by the policy, or are other starts
            length = lengths[sample.group, sample.sample]
            assert sample.response_tokens <= length
            assert sample.finish == "cut" or sample.response_tokens == length


@settings(max_examples=50)
@given(
    policy=st.sampled_from(POLICIES),
    first=st.floats(0, 1),
    lost=st.floats(0, 1),
    zipped=st.booleans(),
)
def test_any_part_of_a_journal(policy: str, first: float, lost: float, zipped: bool) -> None:
    """From any event on, to any byte."""
    header, *lines = journal(policy)
    begins = round(first * len(lines))
    if begins:
        header = header.replace(b"{", b'{"part":3,', 1)
    content = b"".join([header, *lines[begins:]])
    content = content[: len(content) - round(lost**3 * len(content))]
    found = traced(gzip.compress(content, compresslevel=1) if zipped else content)
    event(f"a trace: {found is not None}")
    if found is not None:
        trace, lacks = found
        check(trace)
        assert any("the events before" in one for one in lacks) == (begins > 0)


@settings(max_examples=50)
@given(policy=st.sampled_from(POLICIES), first=st.integers(1, 5000), lost=st.integers(0, 5000))
def test_bytes_without_a_header_are_refused(policy: str, first: int, lost: int) -> None:
    """The settings of the run are in it; so is what a journal needs that is compressed and cut."""
    content = b"".join(journal(policy)[:60])
    assert traced(content[first : max(first, len(content) - lost)]) is None
    assert traced(gzip.compress(content)[: -1 - lost % 100]) is None


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15)
@given(
    restart_s=st.sampled_from([5.0, 24.0, 60.0, 111.0]), lost=st.integers(0, 40), late=st.booleans()
)
def test_journals_around_a_restart(policy: str, restart_s: float, lost: int, late: bool) -> None:
    """Each group is there once, in order, though the first journal lacks its last lines, as after a
    loss of power, or all; `late`: it began before what is left of it."""
    header, *lines = journal(policy, restart_s)
    [at] = [number for number, line in enumerate(lines) if b'"Restored"' in line]
    begins = at // 3 if late else 0
    before = header.replace(b"{", b'{"part":2,', 1) if begins else header
    first = b"".join([before, *lines[begins : max(begins, at - lost)]])
    second = b"".join([header, *lines[at:]])
    both = traced(second, first)
    assert both is not None
    check(both[0])
    after = traced(second)
    assert after is not None
    check(after[0])
    assert set(after[0].groups) <= set(both[0].groups)
    if not late and not lost:
        assert list(both[0].groups) == list(offered().groups)
