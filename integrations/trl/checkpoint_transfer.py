"""A trainer's weights to the fleet by a disk that both see."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_sched.client import BlockingRollouts, Reload
from rollout_sched.integrations.torch.checkpoints import Checkpoints

if TYPE_CHECKING:
    import torch


class CheckpointTransfer:
    """AsyncGRPOTrainer's `weight_transfer` (`WeightTransferProtocol`), and `RolloutFunc`'s.

    Each publishes the next version as a folder in `root`, which every instance sees. When and how
    an instance pauses, loads and goes on is for the scheduler's policy to say, so `pause` and
    `resume` do nothing: nobody waits who need not.
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
