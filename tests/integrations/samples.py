"""Samples of the client, as a scheduler delivers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout_sched.client import Sample, Span


def make_sample(
    uid: str = "a",
    index: int = 0,
    response: Sequence[int] = (3,),
    prompt: Sequence[int] = (1, 2),
    spans: Sequence[Span] = (),
    logprob: float | None = -0.5,
    **other: Any,
) -> Sample:
    """Spans cover the response; without any, version 3 on `http://a` has made it."""
    tokens = len(response)
    spans = spans or [Span(3, "http://a", 0, tokens)]
    return Sample(
        **{
            "uid": uid,
            "index": index,
            "prompt_ids": list(prompt),
            "response_ids": list(response),
            "response_mask": [1] * tokens,
            "rollout_log_probs": None if logprob is None else [logprob] * tokens,
            "versions": [span.version for span in spans for _ in range(span.start, span.end)],
            "segments": list(spans),
            "staleness": 1,
            "finish_reason": "stop",
            "status": "COMPLETED",
            "num_interruptions": 0,
            **other,
        }
    )
