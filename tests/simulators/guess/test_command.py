"""`rollout-sched scenario`: list, show, check, guess."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout_sched.cli import main
from rollout_sched.simulators.guess.architecture import configs
from rollout_sched.simulators.replay.scenario import load_scenario
from rollout_sched.simulators.traces import write
from rollout_sched.simulators.traces.model import SampleRecord, Trace, Turn

Capture = pytest.CaptureFixture[str]
KNOWN = "Qwen/Qwen2.5-7B"


def test_the_list_needs_no_verb(capsys: Capture) -> None:
    assert main(["scenario"]) == 0
    bare = capsys.readouterr().out
    assert main(["scenario", "list"]) == 0
    assert capsys.readouterr().out == bare
    assert "qwen7b-8xh100" in bare


def test_a_shown_scenario_is_its_file(capsys: Capture) -> None:
    assert main(["scenario", "show", "tiny-cpu-2"]) == 0
    shown = capsys.readouterr().out
    assert "step_s = 1.45e-3" in shown
    assert "# one instance: 621.3 tokens/s alone" in shown


def test_a_shown_scenario_can_be_read(capsys: Capture, tmp_path: Path) -> None:
    main(["scenario", "show", "qwen7b-8xh100"])
    file = tmp_path / "again.toml"
    file.write_text(capsys.readouterr().out)
    assert load_scenario(str(file)).cost == load_scenario("qwen7b-8xh100").cost
    assert main(["scenario", "show", str(file)]) == 0
    assert "5.95e-3" in capsys.readouterr().out


def test_a_valid_scenario_passes(capsys: Capture) -> None:
    assert main(["scenario", "check", "qwen7b-8xh100"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("qwen7b-8xh100: valid (8 instances, 520,000 tokens of KV")
    assert "4,533 with 64 at 4,096" in said


def test_a_typo_is_reported(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[fleet]\ninstance = 2\n")
    assert main(["scenario", "check", str(file)]) == 2
    assert 'did you mean "instances"' in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--gpu", "h100", "--model", "qwen2.5-7b"],
        ["--gpu", "h100", "--params", "14e9", "--layers", "40"],
        ["--gpu", "a100", "--params", "70e9", "--layers", "80", "--tp", "4", "--kv-heads", "8"],
        ["--gpu", "l4", "--model", "qwen2.5-1.5b", "--gpus", "2", "--trainer-gpus", "1"],
        ["--gpu", "mi300x", "--model", "Qwen/Qwen3-30B-A3B", "--tp", "2", "--ep", "--kv", "fp8"],
        ["--gpu", "h200", "--gpus", "32", "--model", "moonshotai/Kimi-K2-Instruct", "--tp", "16"],
        [
            *["--hbm-tb-s", "1.2", "--tflops", "300", "--memory-gb", "64", "--link-gb-s", "25"],
            "--model",
            "qwen3-8b",
        ],
    ],
)
def test_a_guess_is_valid_and_can_be_replayed(
    capsys: Capture, tmp_path: Path, arguments: list[str]
) -> None:
    assert main(["scenario", "guess", *arguments]) == 0
    file, trace = tmp_path / "guess.toml", small_trace(tmp_path / "trace.jsonl")
    file.write_text(capsys.readouterr().out)
    assert main(["scenario", "check", str(file)]) == 0
    assert main(["replay", trace, "--policy", "dplb", "--scenario", str(file)]) == 0


def small_trace(path: Path) -> str:
    samples = {f"p{n}": [SampleRecord(f"p{n}", 0, 50, (Turn(40 + n),))] for n in range(8)}
    write(Trace("small", samples), path)
    return str(path)


def test_a_fleet_guessed_in_passing_is_that_of_the_file(capsys: Capture, tmp_path: Path) -> None:
    """The model by its config.json, too; `tune` names the flags in the command that it writes."""
    config, file, out = (tmp_path / name for name in ("config.json", "guess.toml", "out.toml"))
    config.write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], **configs()[KNOWN]}))
    trace, hardware = small_trace(tmp_path / "trace.jsonl"), ["--gpu", "h100", "--gpus", "2"]
    main(["scenario", "guess", *hardware, "--model", KNOWN])
    file.write_text(capsys.readouterr().out)
    figures = []
    for fleet in (["--scenario", str(file)], [*hardware, "--model", str(config)]):
        assert main(["replay", trace, "--policy", "dplb", "--json", "-", *fleet]) == 0
        figures.append(json.loads(capsys.readouterr().out)["policies"])
    assert figures[0] == figures[1]
    asked = [*hardware, "--model", KNOWN, "--max-staleness", "0", "--evaluations", "2"]
    assert main(["tune", trace, *asked, "--jobs", "1", "--out", str(out)]) == 0
    assert f"--gpu h100 --model {KNOWN} --gpus 2 --max-staleness" in out.read_text()


@pytest.mark.parametrize(
    ("fleet", "says"),
    [
        (["--gpu", "h100"], "--gpu guesses a fleet, which needs --gpu and --model"),
        (["--tp", "2"], "--tp guesses a fleet, which needs"),
        (["--gpu", "h100", "--model", KNOWN, "--scenario", "tiny-cpu-2"], "leave one out"),
    ],
)
def test_half_a_fleet_and_two_are_refused(
    capsys: Capture, tmp_path: Path, fleet: list[str], says: str
) -> None:
    trace = small_trace(tmp_path / "trace.jsonl")
    asked = ["--max-staleness", "0", "--out", str(tmp_path / "out.toml")]
    for command in (["replay", trace], ["tune", trace, *asked]):
        assert main([*command, *fleet]) == 2
        assert says in capsys.readouterr().err


def test_assumptions_are_printed(capsys: Capture) -> None:
    main(["scenario", "guess", "--gpu", "b200", "--params", "14e9", "--layers", "40"])
    said = capsys.readouterr().out
    assert "# Nothing was fitted for this GPU: it gets the efficiencies of h100." in said
    assert "# Assumed: a dense model, hidden 5376" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu", "h100"], "--params and --layers"),
        (["--model", "qwen2.5-7b", "--hbm-tb-s", "2"], "--tflops and --memory-gb"),
        (["--gpu", "h100", "--params", "235e9", "--layers", "94"], "mixtures of experts"),
        (["--gpu", "h100", "--model", "qwen3-8b", "--tp", "2", "--dp-attention"], "decrease --tp"),
        (["--gpu", "h100", "--model", "qwen2.5-7b", "--layers", "3"], "give one or the other"),
        (["--gpu", "h100", "--params", "14", "--layers", "40"], "such as 14e9"),
        (["--gpu", "h1000", "--model", "qwen2.5-7b"], 'did you mean "h100"'),
        (["--gpu", "h100", "--config", "gone.json"], "gone.json: no such file or directory\n"),
    ],
)
def test_an_impossible_guess_is_refused(capsys: Capture, arguments: list[str], says: str) -> None:
    assert main(["scenario", "guess", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_drafts_that_pay_are_an_option_of_the_engine(capsys: Capture) -> None:
    """vLLM 0.32 reads the rows as the simulated instance does."""
    asked = ["speculate", "lrm_math_open", "--steps", "2", "--method", "eagle", "--drafter", "d"]
    assert main([*asked, "--acceptance", "0.3"]) == 0
    option, rest = capsys.readouterr().out.split("\n", 1)
    assert json.loads(option.split("'")[1]) == {
        "method": "eagle",
        "model": "d",
        "num_speculative_tokens": 2,
        "num_speculative_tokens_per_batch_size": [[1, 33, 2], [34, 256, 1]],
    }
    gains = [line.split()[-1] for line in rest.splitlines() if line.endswith("x")]
    assert len(gains) == 3
    assert all(1.1 < float(gain[:-1]) < 1.4 for gain in gains)
    assert main([*asked, "--acceptance", "0"]) == 0
    assert "no drafts pay" in capsys.readouterr().out
    assert main([*asked, "--method", "medusa"]) == 2
    assert "expected one of draft_model" in capsys.readouterr().err
