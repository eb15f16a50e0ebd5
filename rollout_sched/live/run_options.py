"""What is to be said of a live run beside its policy, in Python or by flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a policy.

    prompts_per_step  groups in a batch of the trainer's
    start_version     the trainer's version at the start; auto: the one that the instances say they
                      have
    stream_every      tokens between partial results of an instance, so that they survive its death;
                      0 does not stream, which is faster
    seed              of the dice that policies roll
    journal           write every event to this file, a new one
    store             keep the run in this folder, so that it survives its process: a run that is
                      there is gone on with, else one begins
    length_history    learn the response lengths of named prompts, and keep them in this file from
                      one run to the next
    """

    prompts_per_step: Annotated[int, msgspec.Meta(ge=1)] = 64
    start_version: Annotated[int, msgspec.Meta(ge=0)] | Literal["auto"] = 0
    stream_every: Annotated[int, msgspec.Meta(ge=0)] = 0
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    journal: Path | None = None
    store: Path | None = None
    length_history: Path | None = None
