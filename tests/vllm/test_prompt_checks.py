"""The names that a prompt's sampling may have are vLLM's own."""

from __future__ import annotations

from vllm.sampling_params import SamplingParams

from rollout_sched.live.trainer.submissions import SAMPLING

#: What is ours to say, or vLLM's own to know.
NOT_TO_BE_SET = {"n", "max_tokens", "output_kind", "output_text_buffer_length", "skip_clone"}


def test_all_that_may_be_set_is_known_and_nothing_else() -> None:
    fields = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert fields - NOT_TO_BE_SET == SAMPLING
