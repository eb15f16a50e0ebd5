"""Makes groups for the scheduler from the prompts of a TRL trainer."""

from __future__ import annotations

import hashlib
import random
import uuid
from collections.abc import Sequence
from typing import Any

from rollout_sched.live.samples import Prompt

#: Sampling fields of GRPOConfig and AsyncGRPOConfig that have vLLM's names.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Prompts:
    """Makes groups of prompts with a TRL config (GRPOConfig or AsyncGRPOConfig) and the trainer's
    tokenizer or processor.

    Every sample has its own seed: instances that were started with the same seed sample the same
    tokens, so siblings on two such instances would get the same text.
    """

    def __init__(self, args: Any, processing_class: Any) -> None:
        self._args = args
        self._processing_class = processing_class
        self._dice = random.Random(args.seed)
        self._run = uuid.uuid4().hex

    def of(self, prompts: Sequence[Any], samples: int, first: int) -> list[Prompt]:
        """A group of `samples` samples for each prompt (text or messages). The groups are numbered
        from `first`; the number is part of the uid."""
        return [
            Prompt(
                f"{self._run}/{number}",
                token_ids,
                samples,
                self._args.max_completion_length,
                self._sampling(),
                [{"seed": self._dice.getrandbits(63)} for _ in range(samples)],
                prompt_key=_key(token_ids),
            )
            for number, token_ids in enumerate(self.tokenized(prompts), first)
        ]

    def tokenized(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Token ids as in TRL: messages by the chat template, with the generation prompt."""
        if not prompts:
            return []
        if isinstance(prompts[0], str):
            ids = self._processing_class(text=list(prompts))["input_ids"]
        else:
            ids = self._processing_class.apply_chat_template(
                conversation=list(prompts),
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **(self._args.chat_template_kwargs or {}),
            )["input_ids"]
        return [list(token_ids) for token_ids in ids]

    def _sampling(self) -> dict[str, Any]:
        given = {name: getattr(self._args, name) for name in _SAMPLING}
        extra = getattr(self._args, "generation_kwargs", None) or {}
        known = {name: value for name, value in given.items() if value is not None}
        return {**known, "logprobs": 0, **extra}


def _key(token_ids: Sequence[int]) -> str:
    """A key that is the same for the same prompt in every epoch."""
    return hashlib.blake2b(repr(token_ids).encode(), digest_size=16).hexdigest()
