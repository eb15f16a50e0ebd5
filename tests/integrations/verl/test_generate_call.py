"""verl's calls as a gateway takes them, and what is read of its answers."""

from __future__ import annotations

import msgspec
import pytest

from rollout_sched.integrations.verl.generate_call import RolloutLengths, body_of, read, sampling_of

LENGTHS = RolloutLengths(prompt_length=10, response_length=100, max_model_len=105)


@pytest.mark.parametrize(
    ("prompt", "limit", "room"),
    [
        (4, None, 100),  # the whole response
        (30, None, 75),  # as many as the model takes beside a prompt of several turns
        (4, 7, 7),
        (100, 50, 5),
        (109, None, 1),  # verl's servers ask for one, and vLLM says what is wrong
    ],
)
def test_a_response_has_the_room_that_verls_servers_give_it(prompt, limit, room):
    assert LENGTHS.room_after(prompt, limit) == room


def test_turns_share_the_length_of_prompt_and_response():
    assert RolloutLengths(10, 100).room_after(40) == 70


def test_log_probs_are_asked_for_by_a_truth_value():
    assert sampling_of({"logprobs": True}) == ({"logprobs": 0}, None)
    assert sampling_of({"logprobs": False, "top_k": -1}) == ({"top_k": -1}, None)


def test_either_name_of_the_limit_is_understood():
    assert sampling_of({"max_tokens": 3}) == ({}, 3)
    assert sampling_of({"max_new_tokens": 4}) == ({}, 4)


def test_the_callers_parameters_stay_as_they_are():
    given = {"logprobs": True, "max_tokens": 3}
    sampling_of(given)
    assert given == {"logprobs": True, "max_tokens": 3}


def test_a_body_is_what_vllm_generates_from():
    body = msgspec.json.decode(body_of("m", (1, 2), {"logprobs": True}, LENGTHS, priority=3))
    assert body == {
        "model": "m",
        "token_ids": [1, 2],
        "sampling_params": {"logprobs": 0, "max_tokens": 100},
        "priority": 3,
    }
    assert "priority" not in msgspec.json.decode(body_of("m", (1,), {}, LENGTHS))


def answer(finish: str = "stop", segments: object = (), **choice: object) -> bytes:
    made = {"token_ids": [7, 8, 9], "finish_reason": finish, **choice}
    return msgspec.json.encode({"choices": [made], "rollout_sched": {"segments": segments}})


def segment(version: int, start: int, end: int) -> dict[str, object]:
    return {"version": version, "start": start, "end": end, "instance": "http://a"}


def test_an_answer_tells_tokens_log_probs_and_versions():
    logprobs = {"content": [{"token_id": 7, "logprob": -1.5, "rank": 1}] * 3}
    made = read(answer(segments=[segment(4, 0, 1), segment(6, 1, 3)], logprobs=logprobs))
    assert made.token_ids == [7, 8, 9]
    assert made.log_probs == [-1.5] * 3
    assert made.stop_reason == "completed"
    assert made.interruptions == 1
    assert made.extra_fields == {
        "global_steps": 6,
        "min_global_steps": 4,
        "max_global_steps": 6,
        "versions": [4, 6, 6],
    }


def test_an_answer_without_log_probs_or_segments_says_none():
    made = read(answer("abort"))
    assert made.log_probs is None
    assert made.stop_reason == "aborted"
    assert made.extra_fields["min_global_steps"] is None
    assert made.interruptions == 0


def test_an_error_in_place_of_an_answer_is_raised():
    with pytest.raises(msgspec.DecodeError):
        read(b'{"error": {"message": "no"}}')
