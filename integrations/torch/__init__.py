"""Batches as tensors: a data set of a scheduler's batches, and collation to padded or packed
tensors."""

from rollout_sched.integrations.torch.batch_dataset import BatchDataset
from rollout_sched.integrations.torch.checkpoints import Checkpoints
from rollout_sched.integrations.torch.collate import mismatch, packed, padded

__all__ = ["BatchDataset", "Checkpoints", "mismatch", "packed", "padded"]
