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
from rollout_sched.client.remote import ForgottenPrompts, GatewayError
from rollout_sched.client.rollout_scheduler import RolloutScheduler
from rollout_sched.integrations.vllm.weight_updates import Applied, Reload, Transfer
from rollout_sched.live.requests import Tool, Trajectory
from rollout_sched.live.trainer import LeaseEnded
from rollout_sched.live.trainer.samples import Batch, FailedGroup, Prompt, Sample, Span

__all__ = [
    "Applied",
    "Batch",
    "BlockingRollouts",
    "FailedGroup",
    "ForgottenPrompts",
    "GatewayError",
    "LeaseEnded",
    "Prompt",
    "Reload",
    "RolloutScheduler",
    "Sample",
    "Span",
    "Tool",
    "Trajectory",
    "Transfer",
]
