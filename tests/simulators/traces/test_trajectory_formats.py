"""Trajectories with lists of turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout_sched.simulators.traces import Counting, SampleRecord, TraceError, Turn
from tests.simulators.traces.imported import imported


def test_short_key_turns(tmp_path: Path) -> None:
    trace = imported(tmp_path, '{"g":3,"s":0,"p":9,"t":[[5,2,null],[6,1,0.5],[7,4,9.0]]}\n')
    assert trace.groups["3"][0] == SampleRecord("3", 0, 9, (Turn(5, 2), Turn(6, 1, 0.5), Turn(7)))


@pytest.mark.parametrize("after", ["[2],[0.5]", "[2,8],[0.5,9]"])
def test_replay_records(tmp_path: Path, after: str) -> None:
    observed, waited = after.split("],[")
    trace = imported(
        tmp_path,
        '{"group":"g","stream":1,"prompt_len":9,"out_lens":[5,6],'
        f'"obs_lens":{observed}],"tool_times":[{waited}}}\n',
    )
    assert trace.groups["g"][0] == SampleRecord("g", 1, 9, (Turn(5, 2, 0.5), Turn(6)))


# ------------------------------------------------------------------------------------------
# Sessions of coding agents, made up by the format of cc-traces-weka.


def call(t: float, prompt: int, out: int, took_s: float | None = 1.0) -> dict[str, Any]:
    made = {"t": t, "type": "n", "model": "m", "in": prompt, "out": out, "hash_ids": [1, 2]}
    return made if took_s is None else {**made, "api_time": took_s}


def session(*requests: Any, name: str = "s") -> str:
    about = {"id": name, "models": ["m"], "block_size": 64, "hash_id_scope": "local"}
    return json.dumps({**about, "requests": requests})


def test_calls_are_turns_and_subagents_are_samples_of_their_own(tmp_path: Path) -> None:
    subagent = {
        "t": 5.0,
        "type": "subagent",
        "agent_id": "x",
        "requests": [call(5.5, 30, 7), call(7.0, 50, 2)],
    }
    text = "\n".join(
        (
            session(call(0.0, 100, 20), subagent, call(10.0, 180, 0), call(12.0, 90, 5, None)),
            session(call(3.0, 11, 12), name="t"),
        )
    )
    assert imported(tmp_path, text).groups == {
        "s": [
            SampleRecord("s", 0, 100, (Turn(20, 60, 9.0), Turn(1, 0, 1.0), Turn(5)), 0.0, "unknown")
        ],
        "s/1": [SampleRecord("s/1", 0, 30, (Turn(7, 13, 0.5), Turn(2)), 5.5, "unknown")],
        "t": [SampleRecord("t", 0, 11, (Turn(12),), 3.0, "unknown")],
    }


@pytest.mark.parametrize(
    ("requests", "field"),
    [([7], "requests"), ([{"t": 0, "in": -1, "out": 1}], "in"), ([{"in": 1, "out": 1}], "t")],
)
def test_a_bad_call_is_named(tmp_path: Path, requests: Any, field: str) -> None:
    with pytest.raises(TraceError, match=f"line 1, field '{field}'"):
        imported(tmp_path, session(*requests))


def test_agents_within_agents_end(tmp_path: Path) -> None:
    inner: dict[str, Any] = call(1.0, 5, 6)
    for _ in range(400):
        inner = {"t": 1.0, "type": "subagent", "requests": [inner]}
    assert imported(tmp_path, session(inner)).sample_count == 1


# ------------------------------------------------------------------------------------------
# llm-d's request logs, made up: conversations by id, groups by the hash of the prompt.


LOG = """
{"ts":110.0,"request_id":"a","turn":0,"endpoint":"10.0.0.1","prompt_hash":"h","prompt_tokens":100,"output_tokens":40,"gen_s":5.0}
{"ts":112.0,"request_id":"b","turn":0,"endpoint":"10.0.0.2","prompt_hash":"h","prompt_tokens":100,"output_tokens":60,"gen_s":7.0}
{"ts":120.0,"request_id":"a","turn":2,"endpoint":"10.0.0.1","prompt_hash":"j","prompt_tokens":120,"output_tokens":9,"gen_s":1.0}
{"ts":116.0,"request_id":"a","turn":1,"endpoint":"10.0.0.1","prompt_hash":"i","prompt_tokens":150,"output_tokens":30,"gen_s":4.0}
{"ts":130.0,"request_id":"c","prompt_tokens":7,"output_tokens":8}
"""


def test_turns_of_a_request_follow_each_other(tmp_path: Path) -> None:
    trace = imported(tmp_path, LOG)
    # 150 = 100 + 40 + 10 observed; then the history shrank. Turn 1 began at 112, 2 s after turn 0.
    turns = (Turn(40, 10, 2.0), Turn(30, 0, 3.0), Turn(9))
    assert trace.groups == {
        "h": [
            SampleRecord("h", 0, 100, turns, 0.0, "unknown"),
            SampleRecord("h", 1, 100, (Turn(60),), 0.0, "unknown"),
        ],
        "c": [SampleRecord("c", 0, 7, (Turn(8),), 25.0, "unknown")],
    }


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    log = '{"ts":1,"request_id":"a","prompt_tokens":5,"output_tokens":-1}'
    with pytest.raises(TraceError, match=r"line 1, field 'output_tokens': found -1"):
        imported(tmp_path, log)


@pytest.mark.parametrize("late", ["1e38", "1.7e9"])
def test_turns_by_two_clocks_are_refused(late: str, tmp_path: Path) -> None:
    """Seconds of the run in one line, a Unix time in the next: no tool takes thirty years."""
    turn = '{"ts":%s,"request_id":"a","prompt_tokens":5,"output_tokens":1}'
    log = "\n".join(turn % ts for ts in ("1", late, late))
    with pytest.raises(TraceError, match="one clock"):
        imported(tmp_path, log)


# ------------------------------------------------------------------------------------------
# Mooncake's requests, and the sessions that AIPerf and genai-perf make of them.


def requests(*rows: tuple[str, int, int]) -> str:
    return "".join(
        f'{{{head},"input_length":{prompt},"output_length":{output}}}\n'
        for head, prompt, output in rows
    )


def test_mooncake_requests_are_groups_of_one(tmp_path: Path) -> None:
    text = requests(('"timestamp":3000,"hash_ids":[1]', 10, 20), ('"timestamp":null', 5, 6))
    assert imported(tmp_path, text).groups == {
        "request-0": [SampleRecord("request-0", 0, 10, (Turn(20),), 0.0, "unknown")],
        "request-1": [SampleRecord("request-1", 0, 5, (Turn(6),), 0.0, "unknown")],
    }


def test_requests_of_a_session_are_turns(tmp_path: Path) -> None:
    text = requests(
        ('"session_id":"a","timestamp":1000', 655, 52),
        ('"session_id":2,"timestamp":1040', 600, 11),
        ('"session_id":"a","delay":500', 300, 20),
    )
    assert imported(tmp_path, text).groups == {
        "a": [SampleRecord("a", 0, 655, (Turn(52, 300, 0.5), Turn(20)), 0.0, "unknown")],
        "2": [SampleRecord("2", 0, 600, (Turn(11),), pytest.approx(0.04), "unknown")],
    }


def test_prompts_with_the_history_are_known_by_length_or_hashes(tmp_path: Path) -> None:
    """The rows are sorted by time, and the wait is the time between them."""
    text = requests(
        ('"session_id":"a","timestamp":2000', 170, 5), ('"session_id":"a","timestamp":0', 100, 50)
    )
    assert imported(tmp_path, text).groups["a"][0].turns == (Turn(50, 20, 2.0), Turn(5))
    one, two = '"session_id":"a","hash_ids":[1,2]', '"session_id":"a","hash_ids":[{},3]'
    alike = imported(tmp_path, requests((one, 100, 50), (two.format(1), 120, 5)))
    assert alike.groups["a"][0].turns == (Turn(50), Turn(5))
    other = imported(tmp_path, requests((one, 100, 50), (two.format(4), 170, 5)))
    assert other.groups["a"][0].turns == (Turn(50, 170), Turn(5))


@pytest.mark.parametrize("field", ["timestamp", "delay"])
def test_a_bad_time_of_mooncake_is_named_with_its_unit(tmp_path: Path, field: str) -> None:
    with pytest.raises(TraceError, match=rf"line 1, field '{field}': .* expected milliseconds"):
        imported(tmp_path, requests((f'"{field}":"soon"', 5, 6)))


# ------------------------------------------------------------------------------------------
# AReaL's session records, made up: times become tokens, which is said.


RECORDS = """
{"task_id":7,"session_id":70,"rank":0,"status":"accepted","submit_ts":102.0,"finalized_ts":112.0,"total_s":10.0,"generate_s":8.0,"reward_s":0.5,"toolcall_s":1.5}
{"task_id":7,"session_id":71,"rank":0,"status":"rejected","submit_ts":102.5,"finalized_ts":104.0,"total_s":1.5,"generate_s":1.5,"reward_s":0.0,"toolcall_s":0.0}
{"task_id":null,"session_id":72,"submit_ts":100.0,"finalized_ts":101.0,"generate_s":0.001}
{"task_id":8,"session_id":80,"status":"failed","submit_ts":99.0,"finalized_ts":99.1,"generate_s":0.0}
"""


def test_sessions_of_a_task_are_a_group(tmp_path: Path) -> None:
    trace = imported(tmp_path, RECORDS, Counting(tokens_per_s=50))
    counted = {"tokens_counted_by": "seconds * 50"}
    assert trace.about == "AReaL session records"
    assert trace.groups["7"] == [
        SampleRecord(
            *("7", 0, 1, (Turn(200, 0, 1.5), Turn(200)), 2.0, "unknown"),
            labels={"status": "accepted", **counted},
        ),
        SampleRecord(
            *("7", 1, 1, (Turn(75),), 2.5, "unknown"), labels={"status": "rejected", **counted}
        ),
    ]
    assert trace.groups["session-2"][0] == SampleRecord(
        *("session-2", 0, 1, (Turn(1),), 0.0, "unknown"), labels=counted
    )
    assert len(trace.groups) == 2  # who never generated is no sample
    assert trace.estimated_by == "seconds * 50"


@pytest.mark.parametrize("time", ['"soon"', "1e9", "-1"])
def test_a_bad_time_is_named(tmp_path: Path, time: str) -> None:
    record = f'{{"submit_ts":1,"finalized_ts":2,"generate_s":{time}}}'
    with pytest.raises(TraceError, match=r"line 1, field 'generate_s': found"):
        imported(tmp_path, record)


# ------------------------------------------------------------------------------------------
# verl's dumps, and what counts their tokens.


class TestVerlDumps:
    def test_groups_by_input_within_a_step(self, tmp_path: Path) -> None:
        lines = [
            '{"input":"abc","output":"xxxxxxx","step":1,"score":0.5}',
            '{"input":"abc","output":"","step":1}',
            '{"input":"abc","output":"x","step":2}',
            '{"input":"def","output":"x","step":2}',
        ]
        trace = imported(tmp_path, "\n".join(lines))
        assert [len(members) for members in trace.groups.values()] == [2, 1, 1]
        assert trace.prompts_per_step == 2, "of the larger step"
        first, second = next(iter(trace.groups.values()))
        assert (first.prompt_tokens, first.response_tokens) == (1, 3)
        assert first.labels == {
            "step": "1",
            "score": "0.5",
            "tokens_counted_by": "characters / 3.3",
        }
        assert second.response_tokens == 1

    def test_groups_by_uid_and_counts_with_a_tokenizer(self, tmp_path: Path) -> None:
        lines = '{"input":"a b","output":"c d e","uid":"u"}\n{"input":"z","output":"y","uid":"u"}'
        trace = imported(tmp_path, lines, Counting(tokenizer=lambda text: len(text.split())))
        first = trace.groups["u"][0]
        assert len(trace.groups["u"]) == 2
        assert (first.prompt_tokens, first.response_tokens) == (2, 3)
        assert first.labels["tokens_counted_by"] == "tokenizer"
