"""What a trainer holds: prompts in, batches out, new weights announced.

    async with RolloutScheduler.from_toml("tail_batching", ["http://127.0.0.1:8100"]) as rollouts:
        await rollouts.submit(prompts)
        async for batch in rollouts.batches():
            version = train(batch)
            await rollouts.publish_weights(version, Reload(f"/ckpt/{version}"))

`from_toml` schedules in this process, `connect` talks to a running `rollout-sched serve`; what is
written for one works with the other, but for what cannot travel: weight loaders and tools that are
coroutines. `blocking()` makes of either the same without coroutines.
"""

from rollout_sched.client.blocking import BlockingRollouts
from rollout_sched.client.new_weights import Applied
from rollout_sched.client.rollout_scheduler import RolloutScheduler
from rollout_sched.client.submitted_prompts import ForgottenPrompts
from rollout_sched.integrations.gateway.control_plane.trainer_calls import GatewayError
from rollout_sched.integrations.gateway.control_plane.weight_update import Reload, Transfer
from rollout_sched.live.leases import LeaseEnded
from rollout_sched.live.reward_function import KeepFunc, RewardFunc
from rollout_sched.live.samples import Batch, FailedGroup, Prompt, Sample, Span
from rollout_sched.live.trainer_session import Borrower
from rollout_sched.live.trajectory import Tool, Trajectory

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
