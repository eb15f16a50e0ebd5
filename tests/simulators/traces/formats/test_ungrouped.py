"""Serving traces: groups of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_sched.simulators.traces import SampleRecord, Turn
from tests.simulators.traces.imported import imported


def test_serving_csv_becomes_groups_of_one(tmp_path: Path) -> None:
    trace = imported(
        tmp_path, "t_s,prompt_tokens,response_tokens,prefix_hit\n0.0,5,6,0\n4.3,7,8,512\n"
    )
    assert list(trace.groups) == ["0", "1"]
    assert trace.groups["1"][0] == SampleRecord(
        "1", 0, 7, (Turn(8),), 4.3, "unknown", labels={"prefix_hit": "512"}
    )


def test_azure_csv(tmp_path: Path) -> None:
    trace = imported(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
    )
    second = trace.groups["1"][0]
    assert second.arrival_s == pytest.approx(4.314579)
    assert (second.prompt_tokens, second.response_tokens) == (396, 109)


def test_vidur_csv(tmp_path: Path) -> None:
    trace = imported(tmp_path, "arrived_at,num_prefill_tokens,num_decode_tokens\n1.5,10,20\n")
    assert trace.groups["0"][0] == SampleRecord("0", 0, 10, (Turn(20),), 1.5, "unknown")


def test_mooncake_jsonl(tmp_path: Path) -> None:
    trace = imported(
        tmp_path, '{"timestamp":3000,"input_length":10,"output_length":20,"hash_ids":[1,2]}\n'
    )
    assert trace.groups["0"][0] == SampleRecord("0", 0, 10, (Turn(20),), 3.0, "unknown")
