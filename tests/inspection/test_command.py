"""`rollout-sched journal`, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout_sched.cli import main
from rollout_sched.simulators import traces
from tests.inspection.journals import recorded


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "j.jsonl"
    recorded(path, "areal")
    return path


def test_summary(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["journal", "summary", str(path)]) == 0
    out = capsys.readouterr().out
    assert "areal, 6 instances" in out
    assert max(map(len, out.splitlines()[1:])) <= 80
    assert main(["journal", "summary", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "rollout-sched-journal-summary/1"
    assert found["samples_delivered"] == 48


def test_trace(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "again.jsonl"
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert main(["journal", "trace", str(empty), str(path), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    earlier = path.rename(tmp_path / "j.jsonl.1")  # as of an earlier epoch
    path.write_text(earlier.read_text().splitlines(keepends=True)[0])
    assert main(["journal", "trace", str(path), str(earlier), "--out", str(out)]) == 0
    assert "48 samples of 12 groups" in capsys.readouterr().out
    assert "48 samples of 12 groups\n  steps of 4 prompts x 4 samples\n" in printed
    assert "without" not in printed
    assert traces.read(out).name == "again"
    assert main(["replay", str(out), "--policy", "dplb"]) == 0


def test_timeline(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    assert main(["journal", "timeline", str(path), "--out", str(out)]) == 0
    assert {event["ph"] for event in json.loads(out.read_text())["traceEvents"]} >= set("MXCi")


def test_a_page(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.html"
    assert main(["journal", "timeline", str(path), "--html", str(out)]) == 0
    assert out.read_text().startswith("<!doctype html>")
    assert "open it in a browser" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["journal", "timeline", str(path)])


def test_cat(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["journal", "cat", str(path)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == len(path.read_text().splitlines()) - 1
    assert any(action["type"] == "Dispatch" for line in lines for action in line["actions"])


@pytest.mark.parametrize("verb", ["summary", "cat"])
def test_other_files_are_refused(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "no.txt"
    path.write_text("hello\n")
    assert main(["journal", verb, str(path)]) == 2
    assert "no.txt:1: not a journal line" in capsys.readouterr().err


def test_missing_folder_is_named(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "no" / "t.json"
    assert main(["journal", "timeline", str(path), "--out", str(out)]) == 2
    assert "create it first" in capsys.readouterr().err
