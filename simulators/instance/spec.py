"""The fixed settings of a simulated instance."""

from __future__ import annotations

from typing import Literal

import msgspec

from rollout_sched.simulators.instance.cost_model import CostModel


class InstanceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of an instance; names and defaults are those of vLLM.

    kv_blocks  usable blocks: vLLM's num_gpu_blocks minus its null block
    watermark  fraction of the blocks kept free when admitting while others run

    Raises ValueError for settings that vLLM refuses too.
    """

    cost: CostModel
    kv_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131072
    prefix_caching: bool = True
    scheduling: Literal["fcfs", "priority"] = "fcfs"
    watermark: float = 0.0

    def __post_init__(self) -> None:
        for name in ("kv_blocks", "block_size", "max_num_seqs", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"instance: {name} must be >= 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"instance: max_num_batched_tokens ({self.max_num_batched_tokens}) must be "
                f">= max_num_seqs ({self.max_num_seqs})"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"instance: watermark must be in [0, 1), got {self.watermark}")

    @property
    def watermark_blocks(self) -> int:
        return int(self.watermark * (self.kv_blocks + 1))
