"""One call that asks for several responses: each becomes a request of its own.

So the samples of one prompt may run on different instances, and the scheduler sees what it places.
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
    """One of the responses of a call: its prompt, and what its own body says otherwise."""

    __slots__ = ("prompt", "sampling", "tokens", "values")

    def __init__(
        self, prompt: memoryview, tokens: int, values: Values = NONE, sampling: Values = NONE
    ) -> None:
        self.prompt = prompt
        self.tokens = tokens
        self.values = values
        self.sampling = sampling


def split(body: ClientBody, endpoint: Endpoint, envelope: Envelope, most: int) -> list[One]:
    """The responses of a call, in the order of their index; those of a prompt have it in common.

    They are counted before anything is made of them: BadRequest if there are more than `most`.
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
            f"the call asks for {count} responses (`n` is {samples}), and one call may ask for "
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
    """The sampling parameters in which the samples of a prompt differ from what the client says."""
    said = body.sampling().seed
    seed = None
    if samples > 1 and said is not NOTHING:
        try:
            seed = _SEED.decode(said)
        except msgspec.DecodeError:
            text = "`seed` must be an integer of 64 bits or null where `n` is more than 1"
            raise BadRequest(text) from None
    if seed is None:
        return [{"n": b"1"}] * samples
    # As vLLM does, or all samples were the same.
    return [{"n": b"1", "seed": b"%d" % (seed + index)} for index in range(samples)]
