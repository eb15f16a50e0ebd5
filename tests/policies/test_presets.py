"""Presets and scenarios: every shipped file loads, says what it is, and builds."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import rollout_sched
from rollout_sched import config
from rollout_sched.simulators import traces
from rollout_sched.simulators.instance.sim_instance import SimInstance
from rollout_sched.simulators.replay import load_scenario
from rollout_sched.simulators.replay.runs import replay

ROOT = Path(rollout_sched.__file__).parent
PRESETS = config.shipped("policies/presets")
SCENARIOS = config.shipped("simulators/replay/scenarios")
OURS = {"agentic", "static_split", "round_robin_sync", "dplb", "async_rolling"}
LITERATURE = {
    "aimd_concurrency",
    "april",
    "areal",
    "asyncflow",
    "copris",
    "fully_async_a",
    "fully_async_b",
    "fully_async_c",
    "fully_async_d",
    "laminar",
    "llm_d_wave",
    "magistral",
    "one_step_off",
    "partial_rollout",
    "rhyme",
    "seer",
    "session_thrash_control",
    "sorted_rl",
    "stage_fusion",
    "streamrl",
    "tail_batching",
    "vllm_internal_lb",
    "windowed_fifo",
}


def test_all_files_are_listed_under_their_names() -> None:
    assert sorted(path.stem for path in (ROOT / "policies/presets").glob("*.toml")) == PRESETS
    assert (
        sorted(path.stem for path in (ROOT / "simulators/replay/scenarios").glob("*.toml"))
        == SCENARIOS
    )
    assert set(PRESETS) >= OURS | LITERATURE
    assert len(SCENARIOS) >= 5


@pytest.mark.parametrize("name", PRESETS)
def test_preset_says_what_it_is_and_builds(name: str) -> None:
    policy = config.load_policy(name)
    assert policy.name == name
    assert policy.about.endswith(".")
    assert policy.source
    assert not policy.differs or policy.differs.endswith(".")
    policy.build(seed=1)  # a preset runs live, so it needs no true lengths
    policy.scheduler(4).check_invariants()


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_says_what_it_is_and_makes_instances(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.name == name
    assert scenario.about.endswith(".")
    assert scenario.source
    assert scenario.name.endswith("-disaggregated") <= (not scenario.trainer.colocated)
    assert SimInstance(scenario.instance).gauges().kv_usage == 0


@pytest.mark.parametrize("name", PRESETS)
def test_a_user_s_copy_of_a_preset_is_the_same_policy(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "mine.toml"
    copy.write_text((ROOT / f"policies/presets/{name}.toml").read_text())
    assert config.load_policy(str(copy)).roles == config.load_policy(name).roles


def test_differs_must_be_a_string() -> None:
    assert config.parse_policy("p", {"differs": "It is faster."}).differs == "It is faster."
    with pytest.raises(config.ConfigError, match="p: differs: expected a string"):
        config.parse_policy("p", {"differs": 1})


@pytest.mark.parametrize("mode", "abcd")
def test_verl_updates_as_often_as_its_budget_says(mode: str) -> None:
    roles = config.load_policy(f"fully_async_{mode}").build()
    assert roles.weights.every == roles.freshness.trigger_parameter_sync_step


#: Preset -> the table of the mechanism in its name, and the key if it is not all of it.
MECHANISMS = {
    "april": ("batching", "over_prompts"),
    "areal": ("interruption", ""),
    "copris": ("admission", "factor"),
    "laminar": ("migration", ""),
    "like_lengths": ("selection", ""),
    "llm_d_wave": ("routing", ""),
    "one_step_off": ("batching", ""),
    "partial_rollout": ("interruption", "segment_tokens"),
    "rhyme": ("selection", ""),
    "seer": ("interruption", "segment_tokens"),
    "session_thrash_control": ("admission", ""),
    "sorted_rl": ("batching", ""),
    "stage_fusion": ("lending", ""),
    "streamed_async": ("batching", "part_prompts"),
    "streamed_sync": ("batching", "part_prompts"),
    "streamrl": ("routing", ""),
    "tail_batching": ("batching", ""),
    "windowed_fifo": ("batching", "window_fraction"),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_mechanism_in_its_name_makes_a_preset_faster_or_differs_says_no(name: str) -> None:
    role, key = MECHANISMS[name]
    preset = tomllib.loads((ROOT / f"policies/presets/{name}.toml").read_text())
    left = {other: value for other, value in preset[role].items() if key and other != key}
    without = {**preset, role: left} if left else {k: v for k, v in preset.items() if k != role}
    world = "qwen7b-8xh100" if role == "lending" else "qwen7b-8xh100-disaggregated"
    scenario = load_scenario(world).with_job({"prompts_per_step": 24})
    policies = [config.parse_policy(name, table) for table in (preset, without)]
    [[run], [plain]] = replay(traces.read("lrm_token_economy"), policies, scenario, steps=10)
    gain = plain.summary.total_s / run.summary.total_s
    assert (gain < 1.01) == ("no faster" in preset.get("differs", "")), f"{gain:.3f}x"
