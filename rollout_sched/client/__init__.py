"""The trainer's interface: submit prompts, receive batches, announce new weights.

    async with RolloutScheduler.from_toml("tail_batching", ["http://127.0.0.1:8100"]) as rollouts:
        await rollouts.submit(prompts)
        async for batch in rollouts.batches():
            version = train(batch)
            await rollouts.publish_weights(version, Reload(f"/ckpt/{version}"))

`from_toml` schedules in this process; `connect` talks to a running `rollout-sched serve`. Both have
the same interface, but only `from_toml` accepts weight loaders and tools that are coroutines,
because a coroutine cannot be sent to another process. `blocking()` wraps either for code without
coroutines.
"""

from rollout_sched.client.blocking import BlockingRollouts
from rollout_sched.client.new_weights import Applied
from rollout_sched.client.rollout_scheduler import RolloutScheduler
from rollout_sched.client.submitted_prompts import ForgottenPrompts
from rollout_sched.integrations.gateway.control_plane.trainer_client import GatewayError
from rollout_sched.integrations.gateway.control_plane.weights import Reload, Transfer
from rollout_sched.live.requests.trajectories import Tool, Trajectory
from rollout_sched.live.trainer.delivery import LeaseEnded
from rollout_sched.live.trainer.rewards import KeepFunc, RewardFunc
from rollout_sched.live.trainer.samples import Batch, FailedGroup, Prompt, Sample, Span
from rollout_sched.live.trainer.session import Borrower

__all__ = [
    "Applied",
    "Batch",
    "BlockingRollouts",
    "Borrower",
    "FailedGroup",
    "ForgottenPrompts",
    "GatewayError",
    "KeepFunc",
    "LeaseEnded",
    "Prompt",
    "Reload",
    "RewardFunc",
    "RolloutScheduler",
    "Sample",
    "Span",
    "Tool",
    "Trajectory",
    "Transfer",
]
