"""A batch of a rollout as a client sends it: prompts as token ids, lengths from a trace.

How long an answer will be is told to the simulated instance alone, in a field that routers forward
unread: to them all requests of a batch look alike but for their prompts.
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
    """One request: its body, the headers that name its group and session, the length to come."""

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
    """The groups of the trace's n-th batch, beginning anew at its end; each has `samples`.

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
    """The requests, group by group. Siblings share a prompt; no two groups, no two nonces do.

    cap: max_tokens of every request. as_text: prompts of as many words, for a router that takes no
    token ids.
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
    """The prompt of this name, always the same one."""
    return (
        " ".join(f"w{token}" for token in ids_of(name, tokens)) if as_text else ids_of(name, tokens)
    )


def ids_of(name: str, tokens: int) -> list[int]:
    """So many token ids, drawn by name."""
    dice = random.Random(name)
    return list(islice(iter(lambda: dice.randrange(VOCABULARY), -1), tokens))
