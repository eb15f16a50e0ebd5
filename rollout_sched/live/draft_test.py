"""The test of verified resume: which tokens that older weights made may stay.

A token that was drawn with probability p_old is kept with probability min(1, p_new / p_old), the
test of speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318). A
`leniency` l > 0 multiplies the ratio by e^l, as SPEC-RL (arXiv 2509.23232) does: a kept token is
then at most e^l times as likely as under the new weights. The response is cut at the first token
that is not kept, and continues from p_new.

Speculative sampling draws the token at the cut from the residual, max(0, p_new - p_old) normalised
to sum to one; then all tokens are distributed exactly as p_new. Here the token at the cut is drawn
from p_new itself: its error is the total variation between p_old and p_new there (the probability
of the cut) times that between p_new and the residual. No other token has an error
(`tests/live/test_draft_test.py` computes it). The residual would need the whole distribution p_old
of every token to be stored.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollout_sched.core.actions import Dispatch
from rollout_sched.live.ports import PromptToken

#: Sampling values allowed when drafts are verified: with others, tokens are not drawn from the
#: distribution that the prompt log-probabilities describe.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "min_tokens": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
}
_ABSENT = (
    "allowed_token_ids",
    "bad_words",
    "logit_bias",
    "logits_processors",
    "prompt_logprobs",
    "structured_outputs",
    "thinking_token_budget",
)


class DraftTest(msgspec.Struct, frozen=True):
    """The test with its leniency, and a separate random generator for every attempt."""

    leniency: float
    seed: int = 0

    def passed(
        self,
        dispatch: Dispatch,
        old: Sequence[float],
        new: Sequence[PromptToken],
        *,
        greedy: bool = False,
    ) -> int:
        """How many leading tokens stay. `old`: their log-probabilities when they were drawn. A
        greedy token stays if it is still the most likely one."""
        if greedy:
            return next((i for i, token in enumerate(new) if token.rank != 1), len(new))
        dice = random.Random(f"{self.seed}/{dispatch.request}/{dispatch.attempt}")
        for place, (before, now) in enumerate(zip(old, new, strict=True)):
            if dice.random() >= acceptance(before, now.logprob, self.leniency):
                return place
        return len(new)


def acceptance(old: float, new: float, leniency: float = 0.0) -> float:
    """The probability that a token is kept, from its log-probabilities."""
    return math.exp(min(0.0, leniency + new - old))


def is_greedy(sampling: Mapping[str, Any]) -> bool:
    return sampling.get("temperature") == 0


def untestable(sampling: Mapping[str, Any]) -> str:
    """Why a response with this sampling cannot be verified; "" if it can."""
    if sampling.get("stop"):
        return "stop: a stop string may lie across the cut; use stop_token_ids"
    for name in _ABSENT:
        if sampling.get(name):
            return f"{name} changes the sampling distribution; leave it out"
    if is_greedy(sampling):
        neutral: Mapping[str, tuple[Any, ...]] = {
            name: values for name, values in _NEUTRAL.items() if name not in ("top_p", "top_k")
        }
    elif sampling.get("temperature", 1) != 1:
        return "temperature: servers report log-probabilities only at 1; set it to 1 (or 0)"
    else:
        neutral = _NEUTRAL
    for name, values in neutral.items():
        if name in sampling and sampling[name] is not None and sampling[name] not in values:
            return f"{name} = {sampling[name]!r} changes the distribution; set it to {values[0]}"
    return ""
