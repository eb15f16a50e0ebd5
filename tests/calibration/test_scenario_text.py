"""The file that a calibration writes is a scenario, and its header is honest."""

from __future__ import annotations

import tomllib

import msgspec
import pytest

from rollout_sched.calibration.bursts import Room
from rollout_sched.calibration.calibration import Calibration
from rollout_sched.calibration.command import scenario_text
from rollout_sched.integrations.vllm.detection import EngineLimits
from rollout_sched.simulators.instance.cost_fit import Fit
from rollout_sched.simulators.instance.model import CostModel
from rollout_sched.simulators.replay.links import Links
from rollout_sched.simulators.replay.scenario import Scenario, parse_scenario

FOUND = Calibration(
    model='a "model" \\ of\nmine',
    instances=2,
    room=Room(64, 131072, 8192),
    limits=EngineLimits(32, None, None, "0.32.0"),
    fit=Fit(CostModel(1.23456e-3, 0.0, 11.7e-6, context_s=1e-7), 2.5e-3, [0.01, -0.05]),
    bursts=28,
    measured=84,
    spread=0.012,
    disturbed=3,
    context=40_000,
    prefix_caching=None,
    writing_s=15e-6,
)


def written(**changes: object) -> tuple[str, Scenario]:
    found = msgspec.structs.replace(FOUND, **changes)
    text = scenario_text(found, "http://gpu-1:8000", "today")
    return text, parse_scenario("mine", tomllib.loads(text))


def test_it_is_a_scenario_with_what_was_found() -> None:
    _, scenario = written(prefix_caching=False, pause_s=0.002, reload_s=0.5)
    assert scenario.fleet.instances == 2
    assert (scenario.fleet.kv_tokens, scenario.fleet.block_size) == (131072, 32)
    assert scenario.fleet.prefix_caching is False
    assert scenario.cost.step_s == 1.235e-3
    assert scenario.weights.seconds == 0.5
    assert 'a "model" \\ of mine' in scenario.about


@pytest.mark.parametrize(
    "says",
    [
        "Fit error 3.0% mean, 5.0% max, over 28 bursts of requests measured 84 times",
        "spread 1.2%",
        "up to 40,000 tokens of context",
        "not in the scenario: 2.50 ms per call, 15.0 us per answer token",
        "3 measurements were thrown away",
        "max_num_batched_tokens: vLLM's default",
        "prefix_caching: a repeated prompt",
        "step_s and weights_s separately",
        "attention_s: too small to measure",
        "the trainer, which is a guess",
        "--weights CHECKPOINT",
        "the time of a pause: the server offers none",
    ],
)
def test_what_is_not_known_is_said(says: str) -> None:
    text, _ = written()
    header = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    assert says in header


def test_what_a_client_sees_is_put_in_without_its_hash_signs() -> None:
    text, scenario = written()
    assert scenario.links is None
    kept, links = text.split("# [links]")
    put_in = kept + "[links]" + links.replace("# ", "")
    assert parse_scenario("mine", tomllib.loads(put_in)).links == Links(2, 1.25e-3, token_s=15e-6)


def test_the_time_of_new_weights_that_is_not_known_is_marked_where_it_stands() -> None:
    said = "put in your own value"
    unknown, known = written(pause_s=0.1)[0], written(pause_s=0.1, reload_s=1.0)[0]
    assert said in unknown.split("[weights]")[1]
    assert said not in known.split("[weights]")[1]


def test_what_is_known_is_not_called_unknown() -> None:
    limits = EngineLimits(32, True, 2048, "0.32.0")
    cost = CostModel(1e-3, 1e-3, 1e-5, 1.6, 1e-5, 1e-7, 1e-9, 1e-4, 1e-3)
    text, _ = written(
        limits=limits,
        fit=Fit(cost, 0.0, [0.0]),
        prefix_caching=True,
        pause_s=0.1,
        reload_s=1.0,
        disturbed=0,
    )
    assert text.count("Not determined") == 1, "the trainer"
    assert "thrown away" not in text


def test_one_that_was_ended_early_says_so() -> None:
    assert "stopped early" in written(whole=False)[0]
    assert "stopped early" not in written()[0]
