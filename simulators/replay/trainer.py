"""How long the trainer takes for a training step, and to transfer new weights to an instance."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Seconds = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class TrainerModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A training step takes `fixed_s + seconds_per_token * tokens` (prompt and response tokens).

    If the batch comes in parts, each takes `seconds_per_token * tokens`, and the step takes
    `fixed_s` more when the last part is trained.

    `placement`: "disaggregated" trains on its own GPUs; "colocated" uses the instances' GPUs, so
    generation stops during training. `keeps_kv`: whether a colocated instance still has its KV
    cache afterwards (engines that sleep to free memory for the optimiser lose it).
    """

    placement: Literal["colocated", "disaggregated"] = "disaggregated"
    fixed_s: Seconds = 5.0
    seconds_per_token: Seconds = 1e-5
    keeps_kv: bool = False

    @property
    def colocated(self) -> bool:
        return self.placement == "colocated"

    def step_s(self, tokens: int, *, last: bool = True) -> float:
        """Seconds for a batch, or for a part of it that may not be the `last`."""
        return (self.fixed_s if last else 0.0) + self.seconds_per_token * tokens


class TransferCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An update of one instance takes `fixed_s + bytes / bytes_per_s`, all instances in parallel.

    Published pauses: 3.5-4 s for a 106B model on 8 H800 to 16 s for a 1T model on 256 H20
    (checkpoint-engine with vLLM 0.10); 1-4 s for 7B-32B on one node.
    """

    fixed_s: Seconds = 1.0
    bytes: Seconds = 0.0
    bytes_per_s: Positive = 10e9

    @property
    def seconds(self) -> float:
        return self.fixed_s + self.bytes / self.bytes_per_s
