"""What the endpoints' answers have in common."""

from __future__ import annotations

from rollout_sched.live.ports import Output, PromptToken
from rollout_sched.simulators.fake_instance.requests import ChoiceChunk, prompt_logprobs, versions


def test_spans_follow_each_other_under_their_labels():
    output = Output([1, 2, 3], None, "stop", ((4, 2), (5, 1)))
    assert versions(output, lambda version: f"v{version}") == [
        {"version": "v4", "start": 0, "end": 2},
        {"version": "v5", "start": 2, "end": 3},
    ]


def test_nothing_is_thought_of_the_first_token_of_a_prompt():
    thought = (PromptToken(-0.5, 1), PromptToken(-2.0, 9))
    chunk = ChoiceChunk(0, [1], None, None, None, True, thought)
    assert prompt_logprobs([7, 8, 9], chunk) == [
        None,
        {"8": {"logprob": -0.5, "rank": 1, "decoded_token": None}},
        {"9": {"logprob": -2.0, "rank": 9, "decoded_token": None}},
    ]
    assert prompt_logprobs([7, 8, 9], chunk._replace(prompt=None)) is None
