"""The options of a live run besides its policy, in Python or as flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a policy.

    prompts_per_step  groups in a batch of the trainer
    start_version     the trainer's version at the start; auto: the version that the instances
                      report
    stream_every      tokens between partial results of an instance, which survive its death; 0: no
                      streaming, which is faster
    seed              of the random choices of policies
    journal           write every event to this file, which must not exist yet
    store             keep the run in this folder across restarts of the process: a run in it is
                      continued, otherwise a new one begins
    length_history    learn the response lengths of named prompts, and keep them in this file from
                      run to run
    """

    prompts_per_step: Annotated[int, msgspec.Meta(ge=1)] = 64
    start_version: Annotated[int, msgspec.Meta(ge=0)] | Literal["auto"] = 0
    stream_every: Annotated[int, msgspec.Meta(ge=0)] = 0
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    journal: Path | None = None
    store: Path | None = None
    length_history: Path | None = None
