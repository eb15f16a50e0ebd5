"""Sends a trainer's weights to the fleet through a shared disk."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_sched.client import BlockingRollouts, Reload
from rollout_sched.integrations.torch import Checkpoints

if TYPE_CHECKING:
    import torch


class CheckpointTransfer:
    """The `weight_transfer` of AsyncGRPOTrainer (`WeightTransferProtocol`) and the `weights` of
    `RolloutFunc`.

    It publishes each new version as a folder in `root`, which every instance can read. The
    scheduler's policy decides when and how an instance pauses, loads and resumes, so `pause` and
    `resume` do nothing.
    """

    def __init__(self, rollouts: BlockingRollouts, root: str | Path) -> None:
        self._rollouts = rollouts
        self._checkpoints = Checkpoints(root)

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write `(name, tensor)` pairs and publish them. Raises OSError, CallerError."""
        state = self._rollouts.state()
        version = state["version"] + 1
        folder = self._checkpoints.write(version, iterator)
        self._rollouts.publish_weights(version, Reload(str(folder)))
        self._checkpoints.delete_before(state["fleet_version"])

    def resume(self) -> None: ...

    def destroy(self) -> None: ...
