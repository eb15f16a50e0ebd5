"""A batch of a rollout as a client sends it: prompts as token ids, lengths from a trace.

Only the simulated instance gets the length of an answer, in a field that routers forward without
reading: to them all requests of a batch look alike except for their prompts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from rollout_sched.simulators.traces.model import SampleRecord, Trace

VOCABULARY = 100_000


@dataclass(frozen=True)
class Ask:
    """One request: its body, the headers with its group and session, its future length."""

    group: str
    session: str
    body: bytes
    tokens: int

    @property
    def headers(self) -> dict[str, str]:
        return {
            "Content-Type": "application/json",
            "X-Group-ID": self.group,
            "X-Session-ID": self.session,
        }


def groups_of(trace: Trace, batch: int, prompts: int, samples: int) -> list[Sequence[SampleRecord]]:
    """The groups of the trace's n-th batch, each with `samples`; the trace repeats at its end.

    Raises ValueError if the trace's groups are smaller.
    """
    large = [members[:samples] for members in trace.groups.values() if len(members) >= samples]
    if not large:
        raise ValueError(f"{trace.name} has no group of {samples} samples; ask for fewer")
    return [large[(batch * prompts + number) % len(large)] for number in range(prompts)]


def asks(
    groups: Sequence[Sequence[SampleRecord]],
    model: str,
    cap: int,
    nonce: str,
    as_text: bool = False,
) -> list[Ask]:
    """The requests, group by group. Siblings share a prompt; groups and nonces never do.

    cap: max_tokens of every request. as_text: prompts of as many words, for a router that does not
    accept token ids.
    """
    return [
        _ask(sample, prompt, model, cap, nonce)
        for members in groups
        for prompt in [prompt_of(f"{nonce}/{members[0].group}", members[0].prompt_tokens, as_text)]
        for sample in members
    ]


def _ask(sample: SampleRecord, prompt: object, model: str, cap: int, nonce: str) -> Ask:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": cap,
        "temperature": 1.0,
        "return_token_ids": True,
        "vllm_xargs": {"fake_response_tokens": sample.response_tokens},
    }
    group = f"{nonce}/{sample.group}"
    return Ask(group, f"{group}/{sample.sample}", msgspec.json.encode(body), sample.response_tokens)


def prompt_of(name: str, tokens: int, as_text: bool) -> list[int] | str:
    """The prompt of this name, always the same."""
    return (
        " ".join(f"w{token}" for token in ids_of(name, tokens)) if as_text else ids_of(name, tokens)
    )


def ids_of(name: str, tokens: int) -> list[int]:
    """`tokens` token ids, drawn by name."""
    dice = random.Random(name)
    return list(islice(iter(lambda: dice.randrange(VOCABULARY), -1), tokens))
