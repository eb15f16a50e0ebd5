"""The names that a prompt's sampling may have are vLLM's own."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.sampling_params import SamplingParams

from rollout_sched.live.requests.continuation import FIELDS
from rollout_sched.live.trainer.submissions import SAMPLING

#: What is ours to say, or vLLM's own to know.
NOT_TO_BE_SET = {"n", "max_tokens", "output_kind", "output_text_buffer_length", "skip_clone"}


def test_all_that_may_be_set_is_known_and_nothing_else() -> None:
    fields = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert fields - NOT_TO_BE_SET == SAMPLING


@pytest.mark.parametrize(
    "kind", [SamplingParams, CompletionRequest, ChatCompletionRequest, GenerateRequest]
)
def test_every_field_of_a_request_has_a_rule_for_responses_that_go_on(kind: Any) -> None:
    names = getattr(kind, "__struct_fields__", None) or kind.model_fields
    public = {name for name in names if not name.startswith("_")}
    assert public - {"output_text_buffer_length"} <= FIELDS.keys()
