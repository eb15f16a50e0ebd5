"""`replay` and `tune` of a journal, as a user types them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from rollout_sched.cli import main
from rollout_sched.simulators import traces
from rollout_sched.simulators.replay.scenario import Job, TrafficModel
from rollout_sched.simulators.traces import Trace
from tests.inspection.journals import recorded


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.journal"
    recorded(path, "one_step_off", "lrm_token_economy", groups=24)
    return path


def test_the_policy_in_use_is_the_baseline(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["replay", str(path), "--policy", "round_robin_sync", "--policy", "one_step_off"]
    assert main(given) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    took = re.fullmatch(r"the run took (.*) s; its replay says (.*) s \(0\.0 % off\)", first)
    assert took is not None
    assert took[1] == took[2]
    assert any(line.startswith("Fastest at staleness 1: one_step_off") for line in rest)
    assert main([*given, "--set", "fleet.instances=2,6", "--json", "-"]) == 0
    said = capsys.readouterr()
    assert said.err.startswith(first)
    worlds = json.loads(said.out)["worlds"]
    assert [world["instances"] for world in worlds] == [2, 6]
    assert [p["name"] for p in worlds[1]["policies"]] == ["one_step_off", "round_robin_sync"]


def test_a_trainer_in_rounds_is_the_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its journal's policy had no groups; others of that name have."""
    path, apart = tmp_path / "run.journal", tmp_path / "apart.jsonl"
    spread = {
        group: [
            msgspec.structs.replace(sample, arrival_s=1 + 999.0 * (number // 4))
            for sample in members
        ]
        for number, (group, members) in enumerate(traces.read("lrm_token_economy").groups.items())
    }
    traces.write(Trace("apart", spread), apart)
    recorded(path, "areal", str(apart), traffic=TrafficModel(), job=Job(batches=False))
    given = ["--policy", "areal", "--policy", "round_robin_sync", "--max-staleness", "0"]
    assert main(["replay", str(path), *given]) == 0
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("the run took ")
    assert first.endswith(" % off)")
    assert "in 'areal in rounds'" in second
    assert any(line.startswith("Fastest at staleness 0: areal in rounds") for line in rest)
    assert any("serve --policy areal --instance" in line for line in rest)


def test_a_replay_far_from_its_run_has_no_verdict(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--policy", "round_robin_sync", "--scenario", "qwen32b-16xh100-disaggregated"]
    assert main(["replay", str(path), *given]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert "generation: " in first
    assert "trainer: " in first
    said = " ".join(rest)
    assert "No verdict, because the replay of the run is " in said
    assert "Fastest" not in said
    assert "rollout-sched serve" not in said


def test_tune_compares_with_the_policy_in_use(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "best.toml"
    given = ["tune", str(path), "--max-staleness", "1", "--evaluations", "90", "--jobs", "1"]
    assert main([*given, "--out", str(out)]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("the run took ")
    said = " ".join(rest)
    assert "] of one_step_off;" in said or "one_step_off (the winner)" in said
    assert f"rollout-sched tune {path} --max-staleness 1" in out.read_text()
    assert main(["tune", "lrm_token_economy", *given[2:], "--out", str(out)]) == 2
    assert "--scenario is missing" in capsys.readouterr().err
