"""Batches as tensors: a data set over a scheduler, and collation to padded and packed tensors."""

from rollout_sched.integrations.torch.batch_dataset import BatchDataset
from rollout_sched.integrations.torch.checkpoints import Checkpoints
from rollout_sched.integrations.torch.collate import packed, padded

__all__ = ["BatchDataset", "Checkpoints", "packed", "padded"]
