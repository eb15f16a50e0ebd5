"""Splits a call that asks for several responses: each becomes a request of its own.

So the samples of one prompt may run on different instances, and the scheduler sees each of them.
"""

from __future__ import annotations

import msgspec

from rollout_sched.integrations.gateway.data_plane.envelope import (
    Envelope,
    prompt_tokens,
    several_prompts,
)
from rollout_sched.integrations.gateway.data_plane.fields import NOTHING, BadRequest, Seed
from rollout_sched.integrations.gateway.data_plane.splice import NONE, ClientBody, Values
from rollout_sched.integrations.vllm.protocol.endpoints import Endpoint

_SEED = msgspec.json.Decoder(Seed | None)


class One:
    """One of the responses of a call: its prompt, and values that differ from the call's body."""

    __slots__ = ("prompt", "sampling", "tokens", "values")

    def __init__(
        self, prompt: memoryview, tokens: int, values: Values = NONE, sampling: Values = NONE
    ) -> None:
        self.prompt = prompt
        self.tokens = tokens
        self.values = values
        self.sampling = sampling


def split(body: ClientBody, endpoint: Endpoint, envelope: Envelope, most: int) -> list[One]:
    """The responses of a call, in order of their index; samples of one prompt share it.

    They are counted before anything is built: raises BadRequest for more than `most`.
    """
    samples = envelope.samples
    prompts = None
    if endpoint == "completions":
        prompts = several_prompts(envelope.prompt, most)
    if prompts is None and samples == 1:
        return [One(envelope.prompt, prompt_tokens(envelope.prompt))]
    count = samples * (1 if prompts is None else len(prompts))
    if count > most:
        raise BadRequest(
            f"the call asks for {count} responses (`n` is {samples}), the limit per call is "
            f"{most}; send it as several calls"
        )
    samplings = _samplings(body, samples)
    ones = []
    for prompt in prompts or [envelope.prompt]:
        tokens = prompt_tokens(prompt)
        values = NONE if prompts is None else {"prompt": prompt}
        ones += [One(prompt, tokens, values, sampling) for sampling in samplings]
    return ones


def _samplings(body: ClientBody, samples: int) -> list[Values]:
    """The sampling parameters that differ between the samples and the client's body."""
    said = body.sampling().seed
    seed = None
    if samples > 1 and said is not NOTHING:
        try:
            seed = _SEED.decode(said)
        except msgspec.DecodeError:
            text = "`seed` must be a 64-bit integer or null if `n` is more than 1"
            raise BadRequest(text) from None
    if seed is None:
        return [{"n": b"1"}] * samples
    # As vLLM does; otherwise all samples would be identical.
    return [{"n": b"1", "seed": b"%d" % (seed + index)} for index in range(samples)]
