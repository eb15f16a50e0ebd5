"""The command line, as a user types it."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

import rollout_sched
from rollout_sched import config, journal
from rollout_sched.cli import COMMANDS, EXAMPLES, Command, main, parse
from rollout_sched.config import PolicyFile, shipped
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.live.live_scheduler import settings_of
from rollout_sched.live.settings import RunOptions, Settings
from rollout_sched.policies.routing import LeastRequests
from rollout_sched.simulators.replay import runs
from rollout_sched.simulators.replay.scenario import Scenario
from rollout_sched.simulators.replay.tables import at
from rollout_sched.simulators.traces import Trace
from rollout_sched.store import Store
from tests import doors
from tests.helpers import loaded_by
from tests.simulators.replay.test_report import FIGURES

SMALL = "lrm_math_open"


#: A command line without its first word -> (exit code, stdout, stderr).
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*arguments: str | int | Path) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def bad_policy(tmp_path: Path) -> Path:
    path = tmp_path / "bad.toml"
    path.write_text("[batching]\nover_prompt = 2\n")
    return path


@pytest.fixture
def tiny_trace(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.jsonl"
    header = {"schema": "rollout-sched-trace/1", "name": "tiny"}
    rows = [
        {"group": f"g{i}", "sample": j, "prompt_tokens": 8, "turns": [[5 + 3 * i + j]]}
        for i in range(4)
        for j in range(2)
    ]
    path.write_text("\n".join(json.dumps(row) for row in [header, *rows]))
    return path


class TestCommands:
    def test_each_has_its_line_in_the_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["--help"])
        shown = " ".join(capsys.readouterr().out.split())
        assert ended.value.code == 0
        assert [c.name for c in COMMANDS if f" {c.name} {c.about} " not in f"{shown} "] == []

    @pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
    def test_each_is_found_in_its_module(
        self, command: Command, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            main([command.name, "--help"])
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: rollout-sched {command.name} ")

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (["serve", "--instnace=http://a"], "--instnace=http://a; did you mean --instance?"),
            (["journal", "trace", "f", "--uot", "o"], "arguments: --uot; did you mean --out?"),
            (["--versoin"], "did you mean --version?"),
            (["replya"], "did you mean replay?"),
            (["journal", "summery", "f"], "did you mean summary?"),
            (["scenario", "gues"], "did you mean guess?"),
            (["tune", "--trase", "x"], "tune: error: unrecognized arguments: --trase\n"),
            (["serve", "--qqq", "x"], "serve: error: unrecognized arguments: --qqq\n"),
            (["serve", "--inst", "x"], "ambiguous option: --inst could match --instance"),
        ],
    )
    def test_a_misspelt_word_is_named_with_the_nearest(
        self, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert says in capsys.readouterr().err

    @pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
    def test_each_has_an_example_that_it_takes(
        self, command: Command, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert callable(parse([command.name, *EXAMPLES[command.name].split()]).run)
        with pytest.raises(SystemExit):
            main([command.name, "--help"])
        example = f"example: rollout-sched {command.name} {EXAMPLES[command.name]}"
        assert "".join(example.split()) in "".join(capsys.readouterr().out.split())

    @pytest.mark.parametrize("name", ["journal", "policy", "scenario", "trace", "ray"])
    def test_each_verb_has_an_example_that_it_takes(self, name: str) -> None:
        parser = argparse.ArgumentParser()
        next(each for each in COMMANDS if each.name == name).add_arguments(parser)
        assert parser._subparsers is not None
        verbs = parser._subparsers._group_actions[0].choices
        for verb, its_parser in dict(verbs or {}).items():
            said = shlex.split(its_parser.epilog.removeprefix("example: "))
            assert said[:3] == ["rollout-sched", name, verb]
            assert callable(parse(said[1:]).run)

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (
                "serve --policy dplb --instance http://a:1 --journal {0}/no/j",
                "{0}/no/j: no such file or directory",
            ),
            (
                "serve --policy dplb --instance http://a:1 --host 192.0.2.1 --port 9017",
                "--host 192.0.2.1 --port 9017: cannot assign requested address",
            ),
            (
                "serve --policy dplb --instance http://a:1 --admin-key-file {0}/no",
                "{0}/no: cannot be read: no such file or directory",
            ),
            (
                "serve --policy dplb --instance http://a:1 --store {0}/file/s",
                "store {0}/file/s: not a directory; choose a writable folder",
            ),
            ("top http://127.0.0.1:1 --once", "http://127.0.0.1:1: connection refused"),
            ("policy show {0}/no", "{0}/no: neither a file nor a shipped policy"),
        ],
    )
    def test_what_the_system_refuses_is_a_sentence_with_its_place(
        self, words: str, says: str, tmp_path: Path, cli: Cli
    ) -> None:
        (tmp_path / "file").write_text("")
        code, _, err = cli(*words.format(tmp_path).split())
        assert code == 2
        assert f"rollout-sched: {says.format(tmp_path)}" in err
        assert "Errno" not in err

    def test_each_is_at_a_door(self) -> None:
        modules = {f"rollout_sched.{command.module}" for command in COMMANDS}
        own = {module for module in modules if doors.house(module) == doors.PACKAGE}
        assert modules - own <= set(doors.public_modules())

    def test_showing_the_version_imports_the_table_of_commands_only(self) -> None:
        run = "try:\n    main(['--version'])\nexcept SystemExit:\n    pass"
        loaded = loaded_by(f"from rollout_sched.cli import main\n{run}")
        assert {module for module in loaded if module.startswith("rollout_sched")} == {
            "rollout_sched",
            "rollout_sched.cli",
        }
        assert not loaded & {"aiohttp", "msgspec", "numpy", "rich"}

    def test_the_list_of_policies_loads_nothing_that_runs(self) -> None:
        loaded = loaded_by("from rollout_sched.cli import main\nmain(['policy', 'list'])")
        assert not loaded & {"aiohttp", "numpy", "rollout_sched.live", "rollout_sched.store"}

    def test_no_hardware_table_is_read_to_show_the_help(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("rollout_sched.simulators.guess.formula._table", None)
        with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(io.StringIO()):
            main(["scenario", "guess", "--help"])
        assert ended.value.code == 0


class TestReplay:
    def test_compares_all_presets_on_the_small_shipped_trace(
        self, cli: Cli, tmp_path: Path
    ) -> None:
        path = tmp_path / "r.json"
        code, out, _ = cli("replay", SMALL, "--steps", 1, "--json", path)
        assert code == 0
        report = json.loads(path.read_text())
        assert report["schema"] == "rollout-sched-replay/1"
        assert report["trace"] == SMALL
        assert report["scenario"] == "qwen7b-8xh100-disaggregated"
        assert report["lower_bound"]["total_s"]["mean"] > 0
        names = [policy["name"] for policy in report["policies"]]
        assert sorted(names) == shipped("policies/presets")
        for policy in report["policies"]:
            assert all(set(at(policy, figure)) == {"mean", "min", "max"} for figure in FIGURES)
            assert policy["samples_lost"]["max"] == 0
            assert policy["name"] in out

    def test_rehearses_traffic_and_an_outage(
        self, cli: Cli, tmp_path: Path, tiny_trace: Path
    ) -> None:
        base = files("rollout_sched") / "simulators/replay/scenarios/tiny-cpu-2.toml"
        mine = tmp_path / "mine.toml"
        mine.write_text(
            base.read_text()
            + "[traffic]\nrate = 2.0\nfor_s = 9.0\n"
            + '[[faults]]\nwhat = "lost"\ninstance = 1\nat_s = 0.1\nreturns_after_s = 2.0\n'
        )
        code, out, _ = cli(
            *("replay", tiny_trace, "--policy", "dplb"),
            *("--scenario", mine, "--seeds", 2, "--full"),
        )
        assert code == 0
        assert "What the clients got" in out
        assert "What went wrong" in out

    def test_takes_policies_and_scenarios_by_name_or_file(
        self, cli: Cli, tmp_path: Path, tiny_trace: Path
    ) -> None:
        mine = tmp_path / "mine.toml"
        mine.write_text('[routing]\nuse = "round_robin"\n')
        path = tmp_path / "r.json"
        code, _, _ = cli(
            *("replay", tiny_trace, "--policy", mine, "--policy", "dplb"),
            *("--scenario", "tiny-cpu-2", "--seeds", 2, "--prompts-per-step", 2),
            *("--samples-per-prompt", 3, "--max-tokens", 9, "--json", path),
        )
        assert code == 0
        report = json.loads(path.read_text())
        assert [policy["name"] for policy in report["policies"]] == ["mine", "dplb"]
        assert report["scenario"] == "tiny-cpu-2"
        keys = ("seeds", "prompts_per_step", "samples_per_prompt", "max_tokens")
        assert [report[key] for key in keys] == [2, 2, 3, 9]
        assert report["policies"][0]["samples_drawn"]["max"] > 0

    def test_the_baseline_comes_first_and_says_how_sure_it_is(
        self, cli: Cli, tmp_path: Path, tiny_trace: Path
    ) -> None:
        path = tmp_path / "r.json"
        arguments = ("--scenario", "tiny-cpu-2", "--resamples", 3, "--json", path)
        code, out, _ = cli("replay", tiny_trace, *arguments)
        assert code == 0
        policies = json.loads(path.read_text())["policies"]
        assert [policy["name"] for policy in policies[:2]] == ["static_split", "round_robin_sync"]
        first = policies[0]["comparison"]["speed_up"]
        assert (first["value"], first["low"], first["high"]) == (1, 1, 1)
        assert all(policy["comparison"]["speed_up"]["low"] for policy in policies)
        assert "1.00x" in out
        assert "from 3 resamples of the prompts" in " ".join(out.split())

    def test_prompts_come_again_with_other_samples(self, cli: Cli, tmp_path: Path) -> None:
        path = tmp_path / "r.json"
        arguments = ("--policy", "dplb", "--epochs", 2, "--json", path)
        code, out, _ = cli("replay", SMALL, *arguments)
        assert code == 0
        report = json.loads(path.read_text())
        keys = ("prompts", "epochs", "groups", "samples_per_prompt")
        assert [report[key] for key in keys] == [76, 2, 152, 2]
        assert "76 prompts x 2 epochs x 2 samples" in out

    def test_biased_policy_is_marked(self, cli: Cli) -> None:
        def row(*arguments: str) -> list[str]:
            policies = ("--policy", "round_robin_sync", "--policy", "tail_batching")
            code, out, _ = cli("replay", SMALL, *policies, *arguments)
            assert code == 0
            rows = (line.lstrip("* ").split() for line in out.splitlines())
            return next(row for row in rows if row[:1] == ["tail_batching"])

        steady, speed_up, time, bias = row("--full")[1:5]
        assert bias == "shorter"
        assert all(ratio.endswith("x") for ratio in (steady, speed_up, time))

    def test_each_run_has_its_own_journal(self, cli: Cli, tmp_path: Path, tiny_trace: Path) -> None:
        folder = tmp_path / "out"
        folder.mkdir()
        code, _, _ = cli(
            *("replay", tiny_trace, "--policy", "dplb", "--policy", "one_step_off"),
            *("--seeds", 2, "--journal", folder / "j.jsonl"),
        )
        assert code == 0
        headers = [journal.read(path)[0] for path in sorted(folder.iterdir())]
        runs = [(header.policy, header.seed) for header in headers]
        assert runs == [("dplb", 0), ("dplb", 1), ("one_step_off", 0), ("one_step_off", 1)]

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["replay", "no_such_trace"], "no such file"),
            (["replay", SMALL, "--policy", "dlpb"], 'did you mean "dplb"?'),
            (["replay", SMALL, "--scenario", "tiny-cpu"], 'did you mean "tiny-cpu-2"?'),
            (["replay", SMALL, "--max-tokens", "2000000"], "set job.max_tokens lower"),
            (["replay", SMALL, "--policy", "dplb", "--policy", "dplb"], "dplb is there twice"),
        ],
    )
    def test_a_mistake_is_told_before_any_file_is_written(
        self, cli: Cli, tmp_path: Path, arguments: list[str], says: str
    ) -> None:
        files = ("--json", tmp_path / "r.json", "--journal", tmp_path / "j.jsonl")
        code, out, err = cli(*arguments, *files)
        assert code == 2
        assert err.startswith("rollout-sched: ")
        assert says in err
        assert "Traceback" not in err
        assert out == ""
        assert list(tmp_path.iterdir()) == []

    def test_a_bad_policy_among_good_ones_stops_all(
        self, cli: Cli, tmp_path: Path, bad_policy: Path
    ) -> None:
        arguments = ("--policy", "dplb", "--policy", bad_policy, "--json", tmp_path / "r.json")
        code, _, err = cli("replay", SMALL, *arguments)
        assert code == 2
        assert "bad: batching.over_prompt: unknown key" in err
        assert list(tmp_path.iterdir()) == [bad_policy]

    def test_a_policy_that_cannot_be_built_stops_all(
        self, cli: Cli, tmp_path: Path, tiny_trace: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Refuses(LeastRequests, frozen=True):
            def __post_init__(self) -> None:
                raise ValueError("not today")

        module: Any = ModuleType("users_module")
        module.Refuses = Refuses
        monkeypatch.setitem(sys.modules, "users_module", module)
        mine = tmp_path / "mine.toml"
        mine.write_text('[routing]\nuse = "users_module:Refuses"\n')
        arguments = ("--policy", "dplb", "--policy", mine, "--journal", tmp_path / "j.jsonl")
        code, _, err = cli("replay", tiny_trace, *arguments)
        assert code == 2
        assert "mine: routing.use: 'users_module:Refuses' is code" in err
        arguments = ("--allow-code", *arguments)
        code, _, err = cli("replay", tiny_trace, *arguments)
        assert code == 2
        assert "mine: routing: not today" in err
        assert sorted(tmp_path.iterdir()) == [mine, tiny_trace]

    def test_figures_go_to_standard_output_alone(self, cli: Cli, tiny_trace: Path) -> None:
        code, out, _ = cli("replay", tiny_trace, "--policy", "dplb", "--json", "-")
        assert code == 0
        assert json.loads(out)["policies"][0]["name"] == "dplb"
        code, _, err = cli("replay", tiny_trace, "--json", "-", "--html", "-")
        assert code == 2
        assert "only one of --json and --html can be -" in err

    def test_a_page_of_one_world_and_one_of_several(
        self, cli: Cli, tiny_trace: Path, tmp_path: Path
    ) -> None:
        path = tmp_path / "page.html"
        asked = ("replay", tiny_trace, "--policy", "dplb", "--html", str(path))
        assert cli(*asked)[0] == 0
        assert "The fleet over time" in path.read_text()
        assert cli(*asked, "--jobs", "2", "--seeds", "2")[0] == 0
        assert "The fleet over time" in path.read_text(), "runs of other processes are drawn, too"
        assert cli(*asked, "--set", "fleet.instances=1,2")[0] == 0
        assert "2 worlds" in path.read_text()
        code, out, _ = cli(*asked[:-1], "-")
        assert (code, out[:15]) == (0, "<!doctype html>")

    def test_ratios_are_to_the_baseline_asked_for_and_the_verdict_comes_last(
        self, cli: Cli, tiny_trace: Path
    ) -> None:
        policies = ("--policy", "dplb", "--policy", "areal", "--policy", "one_step_off")
        code, out, _ = cli(
            "replay", tiny_trace, *policies, "--baseline", "areal", "--max-staleness", 1
        )
        assert code == 0
        assert "The first policy is areal" in out
        assert "Fastest at staleness 4" not in out
        after = out[out.index("Fastest at staleness") :]
        assert "rollout-sched serve --policy" in after

    def test_a_grid_is_one_table(self, cli: Cli, tmp_path: Path, tiny_trace: Path) -> None:
        path = tmp_path / "sweep.json"
        code, out, _ = cli(
            *("replay", tiny_trace, "--policy", "areal", "--set", "freshness.max_staleness=1,2"),
            *("--scenario", "tiny-cpu-2", "--set", "fleet.instances=1,2", "--json", path),
        )
        assert code == 0
        assert out.count("areal freshness.max_staleness=2 | fleet.instances=1") == 1
        assert len(json.loads(path.read_text())["worlds"]) == 2

    def test_a_grid_in_several_processes_is_the_same(self, cli: Cli, tiny_trace: Path) -> None:
        grid = ("--policy", "dplb", "--scenario", "tiny-cpu-2", "--set", "fleet.instances=1,2,3")
        alone, together = (
            cli("replay", tiny_trace, *grid, "--resamples", 2, "--json", "-", *jobs)
            for jobs in ((), ("--jobs", 2))
        )
        assert alone[:2] == together[:2]
        assert len(json.loads(together[1])["worlds"]) == 3

    def test_an_interrupted_grid_says_what_is_missing(
        self, cli: Cli, monkeypatch: pytest.MonkeyPatch, tiny_trace: Path
    ) -> None:
        made = runs.run_policy

        def interrupted(
            policy: PolicyFile, trace: Trace, scenario: Scenario, **options: Any
        ) -> Any:
            if scenario.fleet.instances == 2:
                raise KeyboardInterrupt
            return made(policy, trace, scenario, **options)

        monkeypatch.setattr(runs, "run_policy", interrupted)
        grid = ("--scenario", "tiny-cpu-2", "--set", "fleet.instances=1,2,3")
        code, out, err = cli("replay", tiny_trace, "--policy", "dplb", *grid)
        assert code == 130
        assert "fleet.instances=1" in out
        assert "not finished: fleet.instances=2, fleet.instances=3" in err

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--set", "freshness.max_stalenes=1"], "--set freshness.max_stalenes: there is no"),
            (["--set", "fleet.instances=1,2", "--journal", "j"], "--journal works with one"),
            (["--split", "2"], "needs GPUs of its own"),
        ],
    )
    def test_invalid_grid_is_refused(
        self, cli: Cli, tiny_trace: Path, arguments: list[str], says: str
    ) -> None:
        code, _, err = cli("replay", tiny_trace, "--policy", "dplb", *arguments)
        assert code == 2
        assert says in err

    def test_an_interrupt_reports_what_is_done(
        self, cli: Cli, monkeypatch: pytest.MonkeyPatch, tiny_trace: Path
    ) -> None:
        made = runs.run_policy

        def interrupted(policy: PolicyFile, *arguments: Any, **options: Any) -> Any:
            if policy.name == "areal":
                raise KeyboardInterrupt
            return made(policy, *arguments, **options)

        monkeypatch.setattr(runs, "run_policy", interrupted)
        policies = ("--policy", "dplb", "--policy", "one_step_off", "--policy", "areal")
        code, out, err = cli("replay", tiny_trace, *policies, "--seeds", 2)
        assert code == 130
        assert "one_step_off" in out
        assert "areal" not in out
        assert "not finished: --policy areal" in err

    @pytest.mark.parametrize("option", ["--json", "--journal"])
    def test_a_folder_is_no_file(self, cli: Cli, tmp_path: Path, option: str) -> None:
        code, _, err = cli("replay", SMALL, option, tmp_path)
        assert code == 2
        assert "is a folder" in err

    @pytest.mark.parametrize("option", ["--json", "--journal"])
    def test_missing_folder_is_refused(self, cli: Cli, tmp_path: Path, option: str) -> None:
        code, _, err = cli("replay", SMALL, option, tmp_path / "no" / "r.json")
        assert code == 2
        assert "create it first" in err

    @pytest.mark.parametrize(
        "arguments",
        [
            ["replay"],
            ["replay", SMALL, "--seeds", "0"],
            ["replay", SMALL, "--steps", "some"],
            ["nonsense"],
            [],
        ],
    )
    def test_wrong_usage(self, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert "usage: rollout-sched" in capsys.readouterr().err


def test_a_reader_that_has_enough_is_no_error() -> None:
    """`rollout-sched policy | head -1`: nothing on standard error, as with any other command."""
    reader, writer = os.pipe()
    os.close(reader)
    command = subprocess.run(
        [sys.executable, "-m", "rollout_sched", "policy"],
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (command.returncode, command.stderr) == (141, b"")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"rollout-sched {rollout_sched.__version__}\n"


class TestSalvage:
    def test_says_what_is_given_up_and_lets_the_run_go_on(self, cli: Cli, tmp_path: Path) -> None:
        store = tmp_path / "run"
        Store(store).close()
        (store / "mark").unlink()
        code, out, _ = cli("salvage", store)
        assert code == 0
        assert out.startswith("lost transactions: has lost its mark")
        assert cli("salvage", store) == (0, f"{store}: nothing is lost\n", "")
        Store(store).close()

    def test_makes_no_store(self, cli: Cli, tmp_path: Path) -> None:
        code, _, err = cli("salvage", tmp_path / "run")
        assert code == 2
        assert err.endswith("is not the folder of a store\n")
        assert not (tmp_path / "run").exists()


class TestCheck:
    @pytest.mark.parametrize("name", shipped("policies/presets"))
    def test_presets_are_valid(self, cli: Cli, name: str) -> None:
        code, out, err = cli("policy", "check", name)
        assert (code, err) == (0, "")
        assert out.startswith(f"{name}: valid; staleness ")

    def test_preset_lists_its_differences(self, cli: Cli, tmp_path: Path) -> None:
        path = tmp_path / "mine.toml"
        path.write_text('about = "Fast."\ndiffers = "It waits."\n')
        code, out, _ = cli("policy", "check", path)
        assert (code, out.splitlines()[-2:]) == (0, ["about: Fast.", "differs: It waits."])

    def test_it_shows_the_values_in_effect(self, cli: Cli, tmp_path: Path) -> None:
        path = tmp_path / "mine.toml"
        path.write_text("[batching]\nover_prompts = 2\n[live]\nlease_s = 9.0\n")
        _, out, _ = cli("policy", "check", path)
        assert "mine.toml: valid; staleness 0; in effect:" in out
        assert "  batching: sync (over_prompts = 2.0, part_prompts = 0)\n" in out, "and defaults"
        assert "  routing: least_requests\n" in out
        assert "  live: lease_s = 9.0\n" in out

    def test_updates_at_another_interval_than_the_pacing_counts_from(
        self, cli: Cli, tmp_path: Path
    ) -> None:
        path = tmp_path / "mine.toml"
        freshness = '[freshness]\nuse = "paced"\ntrigger_parameter_sync_step = 4\n'
        path.write_text(freshness + "[weights]\nevery = 2\n")
        code, out, err = cli("policy", "check", path)
        assert (code, out) == (2, "")
        assert "mine: weights.every: 2, but freshness counts from updates every 4 versions" in err
        path.write_text(freshness + "[weights]\nevery = 4\n")
        assert cli("policy", "check", path)[0] == 0

    def test_a_file_with_a_typo(self, cli: Cli, bad_policy: Path) -> None:
        code, out, err = cli("policy", "check", bad_policy)
        assert (code, out) == (2, "")
        assert err.startswith("rollout-sched: bad: batching.over_prompt: unknown key")
        assert 'did you mean "over_prompts"?' in err

    def test_a_setting_that_is_none(self, cli: Cli, tmp_path: Path) -> None:
        path = tmp_path / "mine.toml"
        path.write_text("[live]\nstal_s = 1.0\n")
        code, _, err = cli("policy", "check", path)
        assert code == 2
        assert 'mine: live.stal_s: unknown key; did you mean "stall_s"?' in err
        code, _, err = cli("replay", SMALL, "--policy", path)
        assert (code, "live.stal_s" in err) == (2, True)

    def test_class_without_the_methods_of_its_role(
        self, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "users_policy.py").write_text(
            "from rollout_sched.core import roles\n\nclass Empty(roles.Routing):\n    pass\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        path = tmp_path / "mine.toml"
        path.write_text('[routing]\nuse = "users_policy:Empty"\n')
        code, out, err = cli("policy", "check", path)
        assert (code, err) == (0, "")
        assert "not checked, because it is code (see --allow-code): routing.use users" in out
        assert "users_policy" not in sys.modules
        code, out, err = cli("policy", "check", "--allow-code", path)
        assert (code, out) == (2, "")
        assert "mine: routing.use: 'users_policy:Empty' cannot be a routing policy: it lacks" in err

    def test_the_oracle_is_valid(self, cli: Cli, tmp_path: Path) -> None:
        path = tmp_path / "oracle.toml"
        path.write_text('[prediction]\nuse = "oracle"\n')
        assert cli("policy", "check", path)[0] == 0


def test_scenarios_are_listed_with_what_each_is(cli: Cli) -> None:
    code, out, _ = cli("scenario")
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == shipped("simulators/replay/scenarios")
    assert all(line.endswith(".") for line in lines)


def test_policies_are_listed_by_family_and_staleness(cli: Cli) -> None:
    code, out, _ = cli("policy")
    assert (code, out) == (0, cli("policy", "list")[1])
    listed = [line for line in out.splitlines() if line.startswith("  ")]
    assert sorted(line.split()[0] for line in listed) == shipped("policies/presets")
    assert len(out.splitlines()) - len(listed) == 5, "a line for each way of batching"
    stale = {line.split()[0]: line.split("staleness ")[1][:9].strip() for line in listed}
    assert stale["tail_batching"] == "0"
    assert stale["areal"] == "<= 4"
    assert stale["april"] == "no bound"
    assert out.index("dplb") < out.index("partial_rollout") < out.index("april")


def test_a_policy_is_shown_as_its_file(cli: Cli, tmp_path: Path) -> None:
    _, shown, _ = cli("policy", "show", "areal")
    again = tmp_path / "areal.toml"
    again.write_text(shown)
    assert config.load_policy(str(again)).roles == config.load_policy("areal").roles
    assert cli("policy", "show", again)[1] == shown


class TestTrace:
    def test_list(self, cli: Cli) -> None:
        code, out, _ = cli("trace", "list")
        assert code == 0
        assert SMALL in [line.split()[0] for line in out.splitlines()]

    def test_stats(self, cli: Cli, tiny_trace: Path) -> None:
        code, out, _ = cli("trace", "stats", tiny_trace)
        assert code == 0
        assert "groups" in out

    def test_stats_as_json(self, cli: Cli, tiny_trace: Path) -> None:
        code, out, _ = cli("trace", "stats", tiny_trace, "--json")
        assert code == 0
        figures = json.loads(out)
        assert (figures["groups"], figures["samples"]) == (4, 8)

    def test_convert(self, cli: Cli, tmp_path: Path, tiny_trace: Path) -> None:
        output = tmp_path / "out.jsonl.gz"
        code, out, _ = cli("trace", "convert", tiny_trace, output)
        assert code == 0
        assert "8 samples of 4 groups" in out
        assert len(gzip.decompress(output.read_bytes()).splitlines()) == 9

    def test_other_files_are_refused_as_traces(self, cli: Cli, tmp_path: Path) -> None:
        broken, output = tmp_path / "broken.jsonl", tmp_path / "out.jsonl"
        broken.write_text('{"schema":"rollout-sched-trace/1"}\n{"group":"a"}\n')
        code, _, err = cli("trace", "convert", broken, output)
        assert code == 2
        assert "line 2" in err
        assert not output.exists()


class TestServe:
    def options(self, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
        """What `serve` would be told."""
        from rollout_sched.integrations.gateway import serve

        told: list[Any] = []
        monkeypatch.setattr(serve, "serve", lambda options: told.append(options))
        needed = ("serve", "--policy", "dplb", "--instance", "http://a:1")
        assert main([*needed, *arguments]) == 0
        return told[0]

    def test_every_setting_of_the_driver_is_a_flag(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for field in msgspec.structs.fields(Settings):
            flag = "--" + field.name.replace("_", "-")
            if isinstance(field.default, str):
                given, meant = [field.default], field.default
            else:
                given, meant = ([], True) if isinstance(field.default, bool) else (["1"], 1)
            told = self.options(monkeypatch, flag, *given).live
            assert told == {field.name: meant}
        assert self.options(monkeypatch).live == {}

    def test_omitted_flags_keep_the_options_defaults(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.options(monkeypatch) == Options(policy="dplb", instances=["http://a:1"])

    def test_drain_time_is_a_flag(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.options(monkeypatch, "--grace-s", "300").grace_s == 300
        assert self.options(monkeypatch, "--grace-s", "0").grace_s == 0

    def test_every_option_of_a_run_is_a_flag(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for field in msgspec.structs.fields(RunOptions):
            flag = "--" + field.name.replace("_", "-")
            value = Path("7") if field.default is None else 7
            assert getattr(self.options(monkeypatch, flag, "7"), field.name) == value
        auto = self.options(monkeypatch, "--start-version", "auto")
        assert auto.start_version == "auto"

    def test_instances_may_be_named_by_a_file_alone(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from rollout_sched.integrations.gateway import serve

        told: list[Options] = []
        monkeypatch.setattr(serve, "serve", lambda options: told.append(options))
        assert main(["serve", "--policy", "dplb", "--endpoints", "fleet.yaml"]) == 0
        assert told[0].endpoints == Path("fleet.yaml")
        assert main(["serve", "--policy", "dplb"]) == 2
        assert "--endpoints" in capsys.readouterr().err

    def test_megabytes_are_bytes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.options(monkeypatch, "--max-body", "3").max_body == 3 * 2**20

    def test_flags_go_before_the_policy_file(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        path = tmp_path / "mine.toml"
        path.write_text("[live]\nstall_s = 5.0\nmisses = 4\n")
        options = self.options(monkeypatch, "--policy", str(path), "--misses", "2")
        found = settings_of(config.load_policy(options.policy), options.live)
        assert (found.stall_s, found.misses) == (5.0, 2)

    def test_given_flags_reach_the_options(self, monkeypatch: pytest.MonkeyPatch) -> None:
        options = self.options(
            monkeypatch,
            *("--allow-instance", "http://10.0.0.*:8000", "--allow-instance", "http://b:*"),
            *("--admin-socket", "/run/admin", "--max-samples", "7", "--instance-kv-tokens", "9"),
        )
        assert options.allow_instances == ["http://10.0.0.*:8000", "http://b:*"]
        assert (options.admin_socket, options.max_samples) == (Path("/run/admin"), 7)
        assert options.kv_tokens == 9
        options = self.options(
            monkeypatch,
            *("--weights-root", "/ckpt", "--weights-root", "/more", "--trainer-key-file", "keys"),
        )
        assert options.weights_roots == [Path("/ckpt"), Path("/more")]
        assert options.trainer_key_file == Path("keys")
        defaults = self.options(monkeypatch)
        assert defaults.max_samples >= 100_000 * 16
        assert (defaults.allow_instances, defaults.admin_socket) == ([], None)
        assert (defaults.weights_roots, defaults.trainer_key_file) == ([], None)

    def test_no_key_is_an_argument(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """`ps` would show it."""
        monkeypatch.setenv("COLUMNS", "300")  # no flag is cut
        with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as told:
            main(["serve", "--help"])
        flags = re.findall(r"(?m)^ +(--[\w-]*key[\w-]*)", told.getvalue())
        assert flags
        assert all(flag.endswith("-key-file") for flag in flags)
