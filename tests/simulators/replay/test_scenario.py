"""Scenarios: what a file may say, and what a mistake in one is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout_sched.config import ConfigError
from rollout_sched.simulators.replay.faults import Failing, Lost
from rollout_sched.simulators.replay.scenario import TrafficModel, load_scenario, parse_scenario


def table(**changes: Any) -> dict[str, Any]:
    """A valid scenario with dotted keys set: table(fleet__instances=3)."""
    tables: dict[str, Any] = {
        "fleet": {"instances": 2, "kv_tokens": 1000},
        "cost": {"step_s": 1e-3, "weights_s": 1e-3, "token_s": 1e-6},
    }
    for key, value in changes.items():
        room, _, name = key.partition("__")
        if name:
            tables.setdefault(room, {})[name] = value
        else:
            tables[room] = value
    return tables


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_scenario("mine", table(**changes))
    return str(caught.value)


def test_fleet_and_cost_are_enough() -> None:
    scenario = parse_scenario("mine", table())
    assert scenario.name == "mine"
    assert (scenario.fleet.block_size, scenario.fleet.max_num_seqs) == (16, 256)
    assert (scenario.visibility.poll_s, scenario.visibility.stream_s) == (1.0, 0.0)
    assert not scenario.trainer.colocated
    assert scenario.job.prompts_per_step == 0


def test_an_instance_is_made_from_whole_blocks() -> None:
    scenario = parse_scenario("mine", table(fleet__kv_tokens=1000, fleet__block_size=32))
    assert scenario.instance.kv_blocks == 31


@pytest.mark.parametrize(
    ("changes", "path", "nearest"),
    [
        ({"flet": {}}, "flet", "fleet"),
        ({"fleet__instance": 3}, "fleet.instance", "instances"),
        ({"cost__steps_s": 3}, "cost.steps_s", "step_s"),
        ({"trainer__placment": "colocated"}, "trainer.placment", "placement"),
        ({"visibility__poll": 1}, "visibility.poll", "poll_s"),
        ({"job__prompt_per_step": 1}, "job.prompt_per_step", "prompts_per_step"),
        ({"traffic__patience": 3}, "traffic.patience", "patience_s"),
        ({"faults": [{"what": "lost", "instance": 0, "at": 3}]}, "faults[0].at", "at_s"),
    ],
)
def test_a_misspelt_key_is_told_its_neighbour(
    changes: dict[str, Any], path: str, nearest: str
) -> None:
    text = refusal(**changes)
    assert text.startswith(f"mine: {path}: unknown key")
    assert f'did you mean "{nearest}"?' in text


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"fleet": 3}, "fleet"),
        ({"fleet__instances": 0}, "fleet.instances"),
        ({"fleet__instances": "two"}, "fleet.instances"),
        ({"fleet__kv_tokens": 15}, "fleet.kv_tokens"),
        ({"trainer__placement": "elsewhere"}, "trainer.placement"),
        ({"trainer__fixed_s": -1.0}, "trainer.fixed_s"),
        ({"trainer__fixed_s": float("inf")}, "trainer.fixed_s"),
        ({"visibility__poll_s": float("nan")}, "visibility.poll_s"),
        ({"weights__bytes_per_s": 0}, "weights.bytes_per_s"),
        ({"cost__step_s": -1e-3}, "step_s must be finite and >= 0"),
        ({"cost__exponent": 0.5}, "exponent must be >= 1"),
        ({"fleet__max_num_batched_tokens": 100}, "max_num_batched_tokens (100) must be"),
        ({"job__max_tokens": 1.5}, "job.max_tokens"),
        ({"job__batches": False}, "job.batches is false and there is no [traffic]"),
        ({"traffic": 3}, "traffic: expected a table"),
        ({"traffic__rate": 2.0}, "traffic.for_s: missing"),
        ({"traffic__rate": -2.0}, "traffic.rate"),
        ({"faults": {"what": "lost"}}, "faults: expected tables, as in [[faults]]"),
        ({"faults": [{"at_s": 3}]}, "faults[0].what: expected one of lost, leaving"),
        ({"faults": [{"what": "last", "at_s": 3}]}, "not 'last'; did you mean \"lost\"?"),
        (
            {"faults": [{"what": ["lost"], "at_s": 3}]},
            "faults[0].what: expected one of lost, leaving",
        ),
        ({"faults": [{"what": "lost", "instance": 2, "at_s": 3}]}, "has 2, numbered from 0"),
        ({"faults": [{"what": "lost", "instance": 0, "at_s": -3}]}, "faults[0].at_s"),
        ({"faults": [{"what": "lost", "at_s": 3}]}, "`instance`"),
        ({"faults": [{"what": "failing", "at_s": 0, "share": 1.5}]}, "faults[0].share"),
        (
            {"faults": [{"what": "failing", "at_s": 0, "blame": "instance"}]},
            "faults[0]: no instance can ever be reached again",
        ),
        (
            {"faults": [{"what": "joins", "at_s": 9, "instance": n} for n in (0, 1)]},
            "every instance joins later",
        ),
    ],
)
def test_a_wrong_value_is_told_its_place(changes: dict[str, Any], path: str) -> None:
    text = refusal(**changes)
    assert text.startswith("mine: ")
    assert path in text


@pytest.mark.parametrize("missing", ["fleet", "cost"])
def test_a_missing_table(missing: str) -> None:
    tables = table()
    del tables[missing]
    with pytest.raises(ConfigError, match=f"mine: .*`{missing}`"):
        parse_scenario("mine", tables)


def test_missing_file_names_the_nearest_scenario() -> None:
    with pytest.raises(ConfigError, match=r'neither.*scenario; did you mean "qwen7b-8xh100"'):
        load_scenario("qwen7b-8h100")


def test_bad_toml_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("[fleet")
    with pytest.raises(ConfigError, match=r"broken\.toml: not valid TOML"):
        load_scenario(str(path))


def test_traffic_and_faults() -> None:
    faults = [
        {"what": "lost", "instance": 1, "at_s": 9, "returns_after_s": 5.0},
        {"what": "failing", "at_s": 3.0, "blame": "instance", "instance": 0},
    ]
    scenario = parse_scenario("mine", table(traffic__rate=2.0, traffic__for_s=9.0, faults=faults))
    assert scenario.traffic == TrafficModel(rate=2.0, for_s=9.0)
    assert scenario.faults == (
        Lost(at_s=9.0, instance=1, returns_after_s=5.0),
        Failing(at_s=3.0, blame="instance", instance=0),
    )
    assert parse_scenario("mine", table()).traffic is None


def test_another_job_keeps_what_is_not_given() -> None:
    scenario = load_scenario("tiny-cpu-2").with_job({"prompts_per_step": 7, "epochs": 2})
    other = scenario.with_job({"prompts_per_step": 0, "max_tokens": 9, "policy": "no job's"})
    assert (other.job.prompts_per_step, other.job.epochs, other.job.max_tokens) == (7, 2, 9)
    assert other.fleet == scenario.fleet
