"""A scheduler for TRL's trainers: GRPOTrainer's rollout_func and AsyncGRPOTrainer's worker."""

from rollout_sched.integrations.trl.rollout_func import CheckpointTransfer, RolloutFunc
from rollout_sched.integrations.trl.rollout_worker import RolloutWorker

__all__ = ["CheckpointTransfer", "RolloutFunc", "RolloutWorker"]
