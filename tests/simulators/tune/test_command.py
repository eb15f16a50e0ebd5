"""The command, as a user types it: a file that works, twice the same, and errors that help."""

from __future__ import annotations

import re
import signal
import time
import tomllib
from pathlib import Path

import pytest

from benchmarks.synthetic import synthetic
from rollout_sched.cli import main
from rollout_sched.simulators import traces
from rollout_sched.simulators.tune import command

SCENARIO = "tiny-cpu-2"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.jsonl"
    traces.write(synthetic(24, 2, median=40, cap=120, seed=2), path)
    return path


def run(
    capsys: pytest.CaptureFixture[str], trace: Path, out: Path, *more: str | int
) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    given = ("tune", trace, "--scenario", SCENARIO, "--out", out, "--jobs", 2, *more)
    code = main([str(word) for word in given])
    return code, *capsys.readouterr()


def seconds_of_a_short_search(capsys: pytest.CaptureFixture[str], trace: Path, out: Path) -> float:
    began = time.monotonic()
    assert run(capsys, trace, out, "--max-staleness", 0, "--evaluations", 50)[0] == 0
    return time.monotonic() - began


def test_tune_writes_a_policy_and_its_evidence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, trace: Path
) -> None:
    out = tmp_path / "tuned.toml"
    more = ("--max-staleness", 0, "--evaluations", 50, "--held-out-seeds", 2)
    code, said, _ = run(capsys, trace, out, *more)
    assert code == 0
    assert "Finalists" in said
    assert "Pareto frontier" in said
    assert said.startswith("The winner: ")
    head = out.read_text().splitlines()[0]
    assert head.startswith("# rollout-sched tune ")
    assert "--evaluations 50 --held-out-seeds 2 --seed 0 --out tuned.toml" in head
    assert main(["policy", "check", str(out)]) == 0
    assert (
        main(["replay", str(trace), "--scenario", SCENARIO, "--policy", str(out), "--steps", "2"])
        == 0
    )


def test_the_command_in_the_head_gives_the_file_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, trace: Path
) -> None:
    first, again = tmp_path / "a" / "t.toml", tmp_path / "b" / "t.toml"
    for path in (first, again):
        path.parent.mkdir()
    budget = max(1, round(3 * seconds_of_a_short_search(capsys, trace, first)))
    assert run(capsys, trace, first, "--max-staleness", 1, "--budget", budget)[0] == 0
    head = first.read_text().splitlines()[0]
    evaluations = re.search(r"--evaluations (\d+) --held-out-seeds (\d+)", head)
    more = ("--evaluations", evaluations[1], "--held-out-seeds", evaluations[2], "--jobs", "1")
    assert run(capsys, trace, again, "--max-staleness", 1, *more)[0] == 0
    assert first.read_text() == again.read_text()


class InterruptedBar:
    """A progress bar at which a user interrupts the command after 20 evaluations."""

    def __init__(self) -> None:
        self.evaluations = 0

    def __enter__(self) -> InterruptedBar:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def add_task(self, name: str) -> str:
        return name

    def advance(self, task: str) -> None:
        self.evaluations += 1
        if self.evaluations == 20:
            # Whatever started the tests may have had them ignore the signal.
            before = signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.signal(signal.SIGINT, before)


def test_an_interrupt_keeps_the_best_so_far(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    trace: Path,
) -> None:
    monkeypatch.setattr(command, "_progress", InterruptedBar)
    out = tmp_path / "t.toml"
    code, said, error = run(capsys, trace, out, "--max-staleness", 0, "--evaluations", 300)
    assert code == 0, error
    assert "interrupted" in said
    assert tomllib.loads(out.read_text())["source"] == "rollout-sched tune"
    assert "--held-out-seeds 0" in out.read_text()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--max-staleness", "-1"), "'-1': Expected `int` >= 0"),
        (("--max-staleness", "x"), "'x': Expected `int`"),
        (("--max-staleness", 0, "--max-length-bias", "2"), "'2': Expected `float` <= 1"),
        (("--max-staleness", 0, "--max-step-bias", "nan"), "'nan': Expected `float` >= 0"),
        (("--max-staleness", 0, "--budget", "0"), "'0': Expected `float` > 0"),
        (("--max-staleness", 0, "--budget", "inf"), "'inf': expected a finite number"),
        (("--max-staleness", 0, "--jobs", "0"), "'0': Expected `int` >= 1"),
        (("--max-staleness", 0, "--budget", 5, "--evaluations", 5), "not allowed with"),
        ((), "--max-staleness"),
    ],
)
def test_malformed_arguments(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    trace: Path,
    more: tuple[str | int, ...],
    says: str,
) -> None:
    with pytest.raises(SystemExit):
        run(capsys, trace, tmp_path / "t.toml", *more)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("where", ["missing/t.toml", "."])
def test_a_place_that_cannot_be_written_is_an_error_before_the_search(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    trace: Path,
    where: str,
) -> None:
    monkeypatch.delattr(command, "tune")
    code, _, error = run(capsys, trace, tmp_path / where, "--max-staleness", 0)
    assert code == 2
    assert "folder" in error


def test_what_was_found_is_printed_if_it_cannot_be_written(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    trace: Path,
) -> None:
    monkeypatch.setattr(command, "check_writable", lambda path: None)
    out = tmp_path / "missing" / "t.toml"
    code, said, error = run(capsys, trace, out, "--max-staleness", 0, "--evaluations", 20)
    assert (code, "missing" in error) == (2, True)
    assert tomllib.loads(said)["source"] == "rollout-sched tune"


def test_an_unknown_trace_or_scenario_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, trace: Path
) -> None:
    out = tmp_path / "t.toml"
    assert run(capsys, tmp_path / "none.jsonl", out, "--max-staleness", 0)[0] == 2
    code, _, error = run(capsys, trace, out, "--max-staleness", 0, "--scenario", "nowhere")
    assert code == 2
    assert "shipped scenario" in error
    assert not out.exists()
