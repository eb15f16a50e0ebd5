"""Totals, ratios and steps, as they are shown."""

from __future__ import annotations

import pytest

from benchmarks.live.steps_figures import (
    LiveRun,
    ReplayedRun,
    idle_share,
    paired,
    steps,
    totals,
)
from rollout_sched.metrics import Step


def live(arm, repetition, total_s, steps_s, **other):
    told = {
        "staleness_mean": 0.0,
        "staleness_max": 0,
        "discarded": None,
        "idle": None,
        "failures": [],
        **other,
    }
    return LiveRun(
        arm=arm,
        repetition=repetition,
        total_s=total_s,
        steps_s=steps_s,
        samples=4,
        anomalies={},
        busy=0.1,
        busiest=0.2,
        foreign=0.0,
        router_cpu_s=1.0,
        **told,
    )


def virtual(arm, repetition, total_s, steps_s):
    return ReplayedRun(arm, repetition, total_s, steps_s, 0.0, 0, 0.0, 0.25)


RUNS = [
    live("vllm-router", 0, 100.0, [50.0, 40.0]),
    live("ours", 0, 50.0, [30.0, 15.0], discarded=0.3, idle=0.1, staleness_max=2),
    live("vllm-router", 1, 200.0, [90.0, 90.0]),
    live("ours", 1, 150.0, [70.0, 65.0, 5.0], discarded=0.5, idle=0.2, failures=["g: lost"]),
]
TWINS = [virtual("ours", 0, 40.0, [25.0, 15.0]), virtual("ours", 1, 125.0, [70.0, 55.0])]


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_ratios_are_taken_within_a_repetition():
    ours = [run for run in RUNS if run.arm == "ours"]
    reference = [run for run in RUNS if run.arm == "vllm-router"]
    found = paired(ours, reference)
    assert (found.least, found.most, found.median) == (0.5, 0.75, 0.625)
    assert paired(ours[:1], reference[1:]) is None


def test_a_row_for_each_arm():
    head, _, router, ours = map(cells, totals(RUNS, TWINS))
    router, ours = (dict(zip(head, row, strict=True)) for row in (router, ours))
    assert router["ratio"] == "1.00"
    assert router["replayed s"] == router["live by replayed"] == router["thrown away"] == "-"
    assert ours["all trained s"] == "100 (50-150)"
    assert ours["ratio"] == "0.62 (0.50-0.75)"
    assert ours["live by replayed"] == "1.23 (1.20-1.25)"
    assert ours["most"] == "2"
    assert ours["thrown away"] == "40%"
    assert ours["failures"] == "1"


def test_steps_live_above_replayed_where_there_are_so_many():
    head, _, router, ours, twin = map(cells, steps(RUNS, TWINS))
    assert head == ["arm", "", "step 1", "step 2", "step 3", "idle"]
    assert router == ["vllm-router", "live", "70", "65", "", "-"]
    assert ours == ["ours", "live", "50", "40", "5", "15%"]
    assert twin == ["ours", "replayed", "48", "35", "", "25%"]


def test_idle_is_a_share_of_the_instances_time():
    told = [
        Step(0, 0.0, capacity_s=80.0, idle_s={"barrier": 10.0, "queue_empty": 10.0}),
        Step(1, 10.0, capacity_s=20.0),
    ]
    assert idle_share(told) == pytest.approx(0.2)
    assert idle_share([]) == 0
