"""Payloads of a trainer's samples."""

from __future__ import annotations

from rollout_sched.live.requests.token_payload import DraftTest, TokenPayload
from rollout_sched.live.requests.trajectories import TrajectoryPayload
from rollout_sched.live.trainer.samples import Prompt
from rollout_sched.live.trainer.submissions import SamplePayloads

PROMPT = Prompt("a", [1, 2], 2, 9, {"temperature": 1.0}, each=[{"seed": 1}, {"seed": 2}])


async def tool(trajectory):
    return None


def test_each_sample_is_drawn_as_its_prompt_says():
    payloads = SamplePayloads(4, None, lambda: 0)
    payload = payloads.new(PROMPT, 1)
    assert type(payload) is TokenPayload
    assert payload.sampling == {"temperature": 1.0, "seed": 2}
    assert (payload.prompt_ids, payload.stream_every, payload.test) == ([1, 2], 4, None)
    assert not payloads.verified


def test_what_a_tool_answers_is_a_trajectory():
    payloads = SamplePayloads(0, DraftTest(0.0, 1), lambda: 0)
    assert payloads.verified
    payload = payloads.new(PROMPT, 0, tool)
    assert isinstance(payload, TrajectoryPayload)
    assert payload.sampling["logprobs"] == 0, "drafts are tested by them"
