"""`rollout-sched trace`, and how commands are told of a trace."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from rollout_sched.cli import main
from rollout_sched.simulators.traces import read, shipped

DUMP = "".join(
    json.dumps({"input": f"prompt {n}", "output": "a b c " * (n + 1), "step": 1}) + "\n"
    for n in range(8)
    for _ in range(2)
)


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "dump.jsonl"
    path.write_text(DUMP)
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    made = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "b": 2, "c": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def stats(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, object]:
    assert main(["trace", "stats", *map(str, arguments), "--json"]) == 0
    told: dict[str, object] = json.loads(capsys.readouterr().out)
    return told


def test_a_tokenizer_counts_a_dump(
    capsys: pytest.CaptureFixture[str], dump: Path, tokenizer: Path
) -> None:
    estimated, counted = stats(capsys, dump), stats(capsys, dump, "--tokenizer", tokenizer)
    assert estimated["tokens_estimated_by"] == "characters / 3.3"
    assert counted["tokens_estimated_by"] is None
    assert (counted["response_max"], counted["samples"]) == (24, 16)


def test_convert_keeps_what_was_estimated(dump: Path, tmp_path: Path) -> None:
    out = tmp_path / "native.jsonl"
    assert main(["trace", "convert", str(dump), str(out)]) == 0
    assert read(out).estimated_by == "characters / 3.3"


def test_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(DUMP.encode())))
    assert stats(capsys, "-")["name"] == "stdin"


def test_a_rate_for_times(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sessions = tmp_path / "traces-r0.jsonl"
    sessions.write_text('{"submit_ts":1,"finalized_ts":9,"generate_s":2}\n')
    told = stats(capsys, sessions, "--tokens-per-s", "25")
    assert (told["response_max"], told["tokens_estimated_by"]) == (50, "seconds * 25")
    for wrong in ("0", "-1", "nan", "x"):
        with pytest.raises(SystemExit):
            main(["trace", "stats", str(sessions), "--tokens-per-s", wrong])


def test_a_replay_says_that_tokens_are_estimated(
    capsys: pytest.CaptureFixture[str], dump: Path, tokenizer: Path
) -> None:
    job = ["--policy", "dplb", "--prompts-per-step", "2"]
    assert main(["replay", str(dump), *job, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens_estimated_by"] == "characters / 3.3"
    assert any("Tokens are estimated (characters / 3.3)" in line for line in report["warnings"])
    assert main(["replay", str(dump), *job]) == 0
    assert "Tokens are estimated" in capsys.readouterr().out
    assert main(["replay", str(dump), *job, "--tokenizer", str(tokenizer)]) == 0
    assert "Tokens are estimated" not in capsys.readouterr().out


def test_what_a_cut_hides_is_completed_and_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [
        f"{g},{s},5,{20 + 9 * g * s},{'abort' if s == 3 else 'stop'}"
        for g in range(1, 9)
        for s in range(4)
    ]
    path = tmp_path / "t.csv"
    header = "group_id,sample_idx,prompt_tokens,response_tokens,finish_reason"
    path.write_text("\n".join([header, *rows]))
    main(["trace", "stats", str(path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["cut_share"] == 0.25
    assert found["completed_mean"] > found["response_mean"]
    assert found["completed_p99"] >= found["response_p99"]
    main(["replay", str(path), "--policy", "round_robin_sync"])
    assert "% of the tokens were not recorded" in capsys.readouterr().out


def test_requests_that_are_left_out_are_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("g;p;r\n0;5;6\n1;5;0\n")
    columns = "group=g,prompt=p,response=r"
    out = str(tmp_path / "out.jsonl")
    assert main(["trace", "convert", str(path), out, "--columns", columns]) == 0
    assert f"{path}: requests without tokens, which are left out: 1" in capsys.readouterr().err


def test_shipped_traces_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out and about in out for name, about in shipped().items())


def test_a_bad_trace_is_said_in_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["trace", "stats", str(tmp_path)]) == 2
    assert "no trace in this folder" in capsys.readouterr().err
