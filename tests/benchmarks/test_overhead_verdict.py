"""Targets are judged on ratios within repetitions, and never passed by default."""

from __future__ import annotations

import random

import msgspec
import pytest

from benchmarks.live.arms import OURS, REFERENCE
from benchmarks.live.overhead_verdict import (
    TARGETS,
    Measurement,
    Target,
    columns,
    errors,
    interval,
    judge,
    ratios,
    table,
    verdicts,
)

CPU = Target("short64", "CPU per request", lambda m: m.cpu_us, 1.5)


def measured(arm, repetition, cpu_us, **more):
    nothing = dict.fromkeys(Measurement.__struct_fields__, 0)
    known = {"shape": "short64", "arm": arm, "repetition": repetition, "cpu_us": cpu_us}
    return Measurement(**nothing | {"answered": 100} | known | more)


def test_ratios_are_taken_within_a_repetition():
    # the machine was half as fast in the second: a ratio of medians would say otherwise
    found = [
        measured(REFERENCE, 0, 50.0),
        measured(OURS, 0, 60.0),
        measured(OURS, 1, 120.0),
        measured(REFERENCE, 1, 100.0),
        measured(OURS, 2, 70.0),
    ]
    assert ratios(found, "short64", OURS, CPU.field) == [1.2, 1.2]


@pytest.mark.parametrize(("ours", "met"), [(75.0, True), (76.0, False)])
def test_a_target_is_met_up_to_its_limit(ours, met):
    verdict = judge(CPU, [measured(REFERENCE, 0, 50.0), measured(OURS, 0, ours)])
    assert verdict.met is met
    assert verdict.show().startswith("met" if met else "MISSED")


@pytest.mark.parametrize(
    ("ours", "word"),
    [
        ([70.0] * 2 + [80.0] * 7, "level"),  # 1.6, and 1.4 more than once
        ([70.0] + [80.0] * 8, "MISSED"),  # 1.6, and 1.4 once
        ([70.0, 80.0, 90.0], "MISSED"),  # too few to plead chance
    ],
)
def test_a_difference_within_chance_is_level_with_the_limit(ours, word):
    found = [measured(REFERENCE, k, 50.0) for k in range(len(ours))]
    found += [measured(OURS, k, value) for k, value in enumerate(ours)]
    verdict = judge(CPU, found)
    assert not verdict.met
    assert verdict.level is (word == "level")
    assert verdict.show().startswith(word)


@pytest.mark.parametrize(
    ("count", "left_out"), [(5, None), (6, 0), (8, 0), (9, 1), (12, 2), (15, 3), (20, 5), (30, 9)]
)
def test_the_interval_is_the_sign_tests(count, left_out):
    # at most 1 in 40 is the chance of binomial(count, 1/2) <= left_out, but not of one more
    expected = None if left_out is None else (left_out, count - 1 - left_out)
    assert interval([float(k) for k in reversed(range(count))]) == expected


def test_a_median_is_in_its_interval_19_times_out_of_20():
    rng = random.Random(7)
    runs = [[rng.lognormvariate(0, 1) for _ in range(15)] for _ in range(2000)]
    held = sum(low <= 1 <= high for low, high in map(interval, runs))
    assert 0.95 <= held / len(runs) <= 0.98  # it errs on the side of being wide


@pytest.mark.parametrize("alone", [OURS, REFERENCE])
def test_a_missing_measurement_is_not_met(alone):
    verdict = judge(CPU, [measured(alone, 0, 50.0)])
    assert not verdict.met
    assert verdict.show().startswith("NOT JUDGED")


def test_every_target_of_the_shapes_asked_for_is_judged():
    assert [(v.shape, v.what) for v in verdicts([], ["held1024", "rltok16"])] == [
        (target.shape, target.what) for target in TARGETS if target.shape in ("held1024", "rltok16")
    ]


def test_errors_are_those_of_one_arm_in_all_repetitions():
    found = [
        measured(OURS, 0, 1.0, errors=2),
        measured(OURS, 1, 1.0, errors=3),
        measured(REFERENCE, 0, 1.0, errors=40),
    ]
    assert errors(found, OURS) == 5


def test_the_table_shows_median_range_and_ratio_and_who_refuses():
    found = [
        measured(REFERENCE, 0, 50.0),
        measured(REFERENCE, 1, 52.0),
        measured(OURS, 0, 60.0),
        measured(OURS, 1, 52.0),
        measured("other", 0, 1.0, answered=0, errors=9),
    ]
    lines = table(found, "short64", columns(streams=False, held=False))
    cells = {line.split("|")[1].strip(): line for line in lines[2:]}
    assert "56.0 (52.0-60.0) 1.10x" in cells[OURS]
    assert "51.0 (50.0-52.0) 1.00x" in cells[REFERENCE]
    assert "refuses these" in cells["other"]
    assert "1.0 " not in cells["other"]


def test_measurements_survive_their_json():
    one = measured(OURS, 0, 1.5)
    assert msgspec.json.decode(msgspec.json.encode(one), type=Measurement) == one
