"""Replay: every policy trains every prompt, keeps its promises and never beats the bound."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.synthetic import synthetic
from rollout_sched import journal
from rollout_sched.config import PolicyFile, load_policy, shipped
from rollout_sched.core.errors import PolicyError
from rollout_sched.core.model import events as ev
from rollout_sched.core.model.events import Woke
from rollout_sched.simulators.instance.model import CostModel
from rollout_sched.simulators.instance.sim_instance import SimInstance
from rollout_sched.simulators.replay import fleet
from rollout_sched.simulators.replay.closed_loop import ClosedLoop, RunNotes
from rollout_sched.simulators.replay.faults import Failing
from rollout_sched.simulators.replay.runs import Run, figures, replay, run_policy
from rollout_sched.simulators.replay.scenario import Job, Scenario, TrafficModel, load_scenario
from rollout_sched.simulators.replay.workload import Workload
from rollout_sched.simulators.traces.model import SampleRecord, Trace, Turn, gather
from tests.helpers import make_policy, make_scenario, make_trace, watch
from tests.simulators.instance.reference import ReferenceInstance
from tests.simulators.instance.test_model import drafts

PRESETS = {name: load_policy(name) for name in shipped("policies/presets")}
SCENARIOS = {name: load_scenario(name) for name in shipped("simulators/replay/scenarios")}
SMALL = synthetic(14, 4, median=300, cap=2000, seed=3)


def with_job(scenario: Scenario, **job: Any) -> Scenario:
    return msgspec.structs.replace(scenario, job=msgspec.structs.replace(scenario.job, **job))


def staleness_bound(policy: PolicyFile) -> float:
    """The most its freshness allows; none at all where rounds start over what they leave."""
    roles = policy.build(lengths=lambda group, index: 1)
    if not roles.batching.stops_at_delivery or roles.interruption.keeps_partial:
        return getattr(roles.freshness, "max_staleness", float("inf"))
    return float(policy.roles["freshness"][1].get("max_staleness", 0))


def assert_no_anomaly(
    anomalies: Mapping[str, int], *, discarded_tokens: int, restarts: int
) -> None:
    """Nothing untrue was reported, except what is nobody's fault: a tool may come back to a
    trajectory that was discarded meanwhile, and a client may end a conversation that only the
    scheduler before the last restart knew."""
    allowed = {"unknown_turn": discarded_tokens, "unknown_session": restarts}
    assert anomalies.keys() <= {kind for kind, causes in allowed.items() if causes}


def assert_sound(run: Run, policy: PolicyFile) -> None:
    assert run.samples_lost == 0
    assert_no_anomaly(
        run.anomalies,
        discarded_tokens=run.summary.discarded_tokens,
        restarts=0 if run.outages is None else run.outages.scheduler_restarts,
    )
    assert run.summary.staleness_max <= staleness_bound(policy)
    assert run.gap_to_bound >= -1e-9
    assert min(run.step_gaps) >= -1e-9
    assert run.on_policy_bound_s is None or run.max_staleness == 0
    assert run.gap_to_on_policy_bound is None or run.gap_to_on_policy_bound >= -1e-9
    assert run.summary.idle_bubble <= run.summary.occupancy_bubble + 1e-9 <= 1 + 2e-9


#: Clients take most of the time: every fifth preset in front of them is enough.
CASES = [
    (preset, scenario)
    for number, preset in enumerate(PRESETS)
    for scenario in SCENARIOS
    if scenario != "qwen7b-8xh100-gateway" or number % 5 == 0
]


@pytest.mark.parametrize(("preset", "scenario"), CASES)
def test_every_preset_on_every_scenario(preset: str, scenario: str) -> None:
    policy = PRESETS[preset]
    run = run_policy(policy, SMALL, with_job(SCENARIOS[scenario], prompts_per_step=3), seed=1)
    assert_sound(run, policy)
    assert run.summary.samples_delivered == 56
    assert run.summary.steps == 5
    if policy.roles["batching"][0].__name__ != "TailBatching":
        assert run.gap_to_offered_bound >= -1e-9


turns = st.builds(Turn, st.integers(1, 30), st.integers(0, 9), st.floats(0, 5))


@st.composite
def small_traces(draw: st.DrawFn) -> Trace:
    """Groups of one to four trajectories; prompts of one length within a group."""
    samples = []
    for group in range(draw(st.integers(1, 7))):
        prompt = draw(st.integers(1, 40))
        for index in range(draw(st.integers(1, 4))):
            listed = (*draw(st.lists(turns, max_size=2)), Turn(draw(st.integers(1, 60))))
            arrival = draw(st.sampled_from([0.0, 0.0, 0.0, 3.5, 60.0]))
            samples.append(SampleRecord(f"g{group}", index, prompt, listed, arrival))
    return Trace("random", gather(samples))


scenarios = st.builds(
    make_scenario,
    instances=st.integers(1, 3),
    slots=st.integers(1, 4),
    kv_tokens=st.integers(240, 500),
    train_s=st.sampled_from([0.0, 1.0, 40.0]),
    update_s=st.sampled_from([0.0, 2.5]),
    colocated=st.booleans(),
    keeps_kv=st.booleans(),
    poll_s=st.sampled_from([0.0, 7.0]),
    stream_s=st.sampled_from([0.0, 5.0]),
    prompts_per_step=st.integers(1, 4),
    samples=st.integers(0, 3),
    max_tokens=st.sampled_from([0, 25]),
    speculation=drafts,
)
EXTRA = [
    make_policy(
        "drop", batching="fully_async", freshness={"max_staleness": 0, "when_stale": "drop"}
    ),
    make_policy(
        "affinity",
        routing={"use": "session_affinity", "margin": 1},
        admission="kv_tokens",
        batching="fully_async",
        freshness={"max_staleness": 1},
        interruption={"use": "partial", "at_update": "drain", "segment_tokens": 9},
    ),
    make_policy(
        "dice",
        routing="power_of_two",
        ordering="shortest_first",
        prediction={"use": "group_history", "method": "censored"},
        batching={"use": "sync", "over_prompts": 2.0},
        interruption={"use": "partial", "kv": "retain"},
        freshness={"max_staleness": 1},
    ),
    make_policy("random", routing="random", prediction="oracle", ordering="longest_first"),
    make_policy("migration", migration={"use": "tests.helpers:Restless", "interval_s": 3.0}),
    make_policy(
        "lending", batching={"use": "sync", "part_prompts": 1}, lending="tests.helpers:Generous"
    ),
    make_policy(
        "fusion",
        batching={"use": "sync", "over_prompts": 1.5, "part_prompts": 1},
        migration={"use": "by_cost", "context_s": 1.0},
        lending={"use": "stage_fusion", "whole": 0.3, "slowdown": 9.0},
    ),
    make_policy("tail in parts", batching={"use": "tail_batching", "part_prompts": 1}),
    make_policy(
        "partial in parts",
        batching={"use": "sync", "over_prompts": 1.5, "part_prompts": 2},
        interruption={"use": "partial", "segment_tokens": 9},
        freshness={"max_staleness": 2},
    ),
    make_policy(
        "every_other",
        routing={"use": "length_split", "every": 2},
        prediction="group_history",
        batching="fully_async",
        freshness={"max_staleness": 2},
        interruption={"use": "partial", "at_update": "resubmit"},
        weights={"every": 2},
    ),
]


@settings(max_examples=150, deadline=None)
@given(
    policy=st.sampled_from([*PRESETS.values(), *EXTRA]),
    trace=small_traces(),
    scenario=scenarios,
    seed=st.integers(0, 3),
)
def test_any_small_world_is_served_soundly(
    policy: PolicyFile, trace: Trace, scenario: Scenario, seed: int
) -> None:
    ran = watch(policy, trace, scenario, seed=seed)  # checks the invariants after every event
    assert not ran.scheduler.state.groups
    assert not ran.scheduler.parts.requests
    run = run_policy(policy, trace, scenario, seed=seed)
    assert_sound(run, policy)
    assert run.summary.total_s == ran.total_s


@pytest.mark.skipif(
    not fleet.__file__.endswith(".py"), reason="nothing of compiled classes can be replaced"
)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_event_jump_changes_nothing_here(monkeypatch: pytest.MonkeyPatch, preset: str) -> None:
    """A run whose instances walk step by step says the same at the same times."""
    scenario = make_scenario(instances=2, slots=3, kv_tokens=120, prompts_per_step=2, poll_s=3.0)
    cost = CostModel(step_s=0.91, weights_s=0.1, token_s=0.013, sequence_s=0.007, context_s=3e-4)
    scenario = msgspec.structs.replace(scenario, cost=cost)  # so that no two things coincide
    trace = make_trace({f"g{i}": [5 + 9 * i % 23, 3 + 7 * i % 29] for i in range(8)})
    logs = []
    for instance in (SimInstance, ReferenceInstance):
        workload = Workload(trace, scenario.job)
        scheduler = PRESETS[preset].scheduler(2, lengths=workload.length)
        log: list[tuple[float, Any]] = []

        def note(now: float, event: Any, actions: Any, log: list[Any] = log) -> None:
            if isinstance(event, ev.InstanceReported):  # blocks are handed out ahead of a step
                event = msgspec.structs.replace(event, kv_usage=0.0)
            log.append((round(now, 6), event))

        monkeypatch.setattr(fleet, "SimInstance", instance)
        ClosedLoop(scheduler, workload, scenario, [note]).run()
        logs.append(log)
    assert logs[0] == logs[1]


class TestRoughScenarios:
    """What is shipped to rehearse an outage and a gateway's traffic."""

    def test_the_outage(self) -> None:
        """Long enough for all of it to happen: nothing is lost for good."""
        trace = synthetic(40, 4, median=1500, cap=6000, seed=3)
        scenario = with_job(SCENARIOS["qwen7b-8xh100-outage"], prompts_per_step=5)
        run = run_policy(PRESETS["dplb"], trace, scenario)
        assert_sound(run, PRESETS["dplb"])
        assert run.direct is None
        of = run.outages
        assert (of.instances_lost, of.instances_left, of.instances_returned) == (2, 1, 2)
        assert of.failed_attempts > 0
        assert of.failed_prompts == 0
        assert of.away_s > 180.0 + 120.0

    def test_the_gateway(self) -> None:
        run = run_policy(PRESETS["dplb"], SMALL, SCENARIOS["qwen7b-8xh100-gateway"])
        assert_sound(run, PRESETS["dplb"])
        assert run.outages is None
        of = run.direct
        assert of.answered + of.withdrawn == of.submitted > 1000
        assert of.first_token_p50_s is not None
        assert 0 < of.first_token_p50_s <= of.latency_p50_s < of.latency_p99_s < 60.0

    def test_client_traffic_after_training_is_not_in_its_figures(self) -> None:
        traffic = TrafficModel(rate=0.1, for_s=500.0)
        trace = make_trace({"a": [5], "b": [5]})
        run = run_policy(make_policy(), trace, make_scenario(traffic=traffic, poll_s=1.0))
        assert run.direct.answered > 30
        assert run.summary.total_s < 50.0
        assert sum(step.capacity_s for step in run.steps) < 50.0

    def test_traffic_alone(self) -> None:
        traffic = TrafficModel(rate=0.1, for_s=500.0, patience_s=6.5)
        scenario = make_scenario(traffic=traffic, batches=False)
        run = run_policy(make_policy(), make_trace({"a": [5], "b": [9]}), scenario)
        assert run.direct.answered > 0 < run.direct.withdrawn
        assert (run.bound_s, run.gap_to_bound, run.gap_to_offered_bound) == (0.0, None, None)
        assert (run.summary.steps, run.samples_lost) == (0, 0)
        assert run.summary.total_s > 400.0
        spread = figures([run])
        assert spread["gap_to_bound"] is spread["step_gap_to_bound"] is None
        assert spread["direct"]["answered"]["mean"] == run.direct.answered
        assert "outages" not in spread

    def test_prompts_that_fail_are_not_lost(self) -> None:
        faults = [Failing(at_s=0.0, for_s=6.0, blame="request")]
        trace = make_trace({f"g{i}": [5, 3] for i in range(4)})
        run = run_policy(make_policy(), trace, make_scenario(slots=2, faults=faults))
        assert run.outages.failed_prompts == 4
        assert (run.samples_lost, run.summary.samples_delivered) == (0, 0)


class TestBounds:
    def test_one_sample_alone_meets_its_bound(self) -> None:
        run = run_policy(make_policy(), make_trace({"a": [9]}), make_scenario())
        assert run.gap_to_bound == pytest.approx(0.0, abs=1e-6)
        assert run.step_gaps == [pytest.approx(0.0, abs=1e-6)]


class TestReplay:
    trace = make_trace({f"g{i}": [3 + i, 9 - i] for i in range(4)})

    def test_runs_by_policy_then_seed(self) -> None:
        policies = [make_policy("one"), make_policy("two", routing="random")]
        runs = replay(self.trace, policies, make_scenario(), seeds=2)
        assert [[(run.policy, run.seed) for run in of_one] for of_one in runs] == [
            [("one", 0), ("one", 1)],
            [("two", 0), ("two", 1)],
        ]

    def test_progress_counts_prompts(self) -> None:
        delivered: list[int] = []
        run_policy(make_policy(), self.trace, make_scenario(), progress=delivered.append)
        assert delivered == [1, 1, 1, 1]

    def test_steps_take_the_head(self) -> None:
        run = run_policy(make_policy(), self.trace, make_scenario(prompts_per_step=2), steps=1)
        assert run.summary.samples_delivered == 4

    def test_a_single_journal_has_the_name_it_was_given(self, tmp_path: Path) -> None:
        path = tmp_path / "run.jsonl"
        replay(self.trace, [make_policy("one")], make_scenario(), journal_path=path)
        header, entries = journal.read(path)
        assert (header.policy, header.prompts_per_step, header.seed) == ("one", 1, 0)
        assert len(list(entries)) > 10
        assert list(tmp_path.iterdir()) == [path]

    def test_several_journals_are_told_apart(self, tmp_path: Path) -> None:
        policies = [make_policy("one"), make_policy("two")]
        path = tmp_path / "run.jsonl"
        replay(self.trace, policies, make_scenario(), seeds=2, journal_path=path)
        names = [f"run.{policy}.{seed}.jsonl" for policy in ("one", "two") for seed in (0, 1)]
        assert sorted(entry.name for entry in tmp_path.iterdir()) == names
        for name in names:
            header, _ = journal.read(tmp_path / name)
            assert name == f"run.{header.policy}.{header.seed}.jsonl"

    def test_figures_spread_over_the_seeds(self) -> None:
        runs = replay(self.trace, [make_policy("one")], make_scenario(prompts_per_step=2), seeds=3)
        spread = figures(runs[0])
        totals = [run.summary.total_s for run in runs[0]]
        assert spread["total_s"] == {
            "mean": pytest.approx(sum(totals) / 3),
            "min": min(totals),
            "max": max(totals),
        }
        assert spread["staleness"]["histogram"]["0"]["mean"] == 8.0
        assert spread["steady_accepted_tokens_per_s"] is not None


PROGRAM = """
import sys, msgspec
from rollout_sched.config import load_policy, shipped
from rollout_sched.simulators.replay.runs import replay
from rollout_sched.simulators.replay.report import document
from rollout_sched.simulators.replay.scenario import load_scenario
from benchmarks.synthetic import synthetic
trace = synthetic(12, 4, median=300, cap=2000, seed=3)
scenario = load_scenario("tiny-cpu-2")
policies = [load_policy(name) for name in shipped("policies/presets")]
runs = replay(trace, policies, scenario, seeds=2)
report = document(trace, scenario, runs, steps=0, seeds=2)
sys.stdout.buffer.write(msgspec.json.encode(report))
"""


def test_the_same_seed_gives_the_same_bytes_in_every_process() -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
        )
        for seed in ("0", "4711")
    ]
    first, second = (process.communicate(timeout=60)[0] for process in processes)
    assert first
    assert first == second


def test_a_run_that_lasts_too_long_is_given_up() -> None:
    trace = synthetic(2, 2, median=5, cap=9, prompt_median=5)
    notes = RunNotes("ours", Workload(trace, Job(prompts_per_step=2)), None, give_up_s=10.0)
    notes.observe(10.0, Woke(), [])
    with pytest.raises(PolicyError, match="ours: run not finished after 10 s"):
        notes.observe(10.1, Woke(), [])
    assert notes.events == 2


def test_progress_counts_delivered_groups() -> None:
    trace, told = synthetic(4, 2, median=50, cap=200, prompt_median=20), list[int]()
    run = run_policy(
        load_policy("streamed_sync"), trace, load_scenario("tiny-cpu-2"), progress=told.append
    )
    assert sum(told) == 4
    assert run.samples_lost == 0
