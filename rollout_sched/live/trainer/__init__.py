"""The trainers' side: submissions, batches, rewards, new weights."""

from rollout_sched.live.instances.fleet import Borrower
from rollout_sched.live.trainer import samples
from rollout_sched.live.trainer.delivery import TRAINER, LeaseEnded, NotReady, TrainerName
from rollout_sched.live.trainer.rewards import KeepFunc, RewardFunc, reward_settings_of
from rollout_sched.live.trainer.session import WeightPublisher
from rollout_sched.live.trainer.stored import StoredWeights
from rollout_sched.live.trainer.submissions import SamplePayloads

__all__ = [
    "TRAINER",
    "Borrower",
    "KeepFunc",
    "LeaseEnded",
    "NotReady",
    "RewardFunc",
    "SamplePayloads",
    "StoredWeights",
    "TrainerName",
    "WeightPublisher",
    "reward_settings_of",
    "samples",
]
