"""What OpenAI's chats and completions have in common in their answers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rollout_sched.simulators.fake_instance.requests import ChoiceChunk, Json, ParsedRequest


def answer(asked: ParsedRequest, kind: str, choices: Sequence[Json], usage: Json | None) -> Json:
    """An answer, or an event of a streamed one."""
    return {
        "id": asked.id,
        "object": kind,
        "created": int(time.time()),
        "model": asked.model,
        "choices": choices,
        "usage": usage,
    }


def choice(asked: ParsedRequest, chunk: ChoiceChunk, logprobs: Json | None) -> Json:
    """A choice without its text."""
    told: Json = {
        "index": chunk.choice,
        "logprobs": logprobs,
        "finish_reason": chunk.finish,
        "stop_reason": None,
    }
    if asked.return_token_ids:
        told["token_ids"] = chunk.token_ids
    return told


def name(asked: ParsedRequest, token: int, word: str) -> str:
    """The name of a token in log-probs: its word, or its id if that was requested."""
    return f"token_id:{token}" if asked.ids_for_words else word
