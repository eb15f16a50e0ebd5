"""A live run, replayed from its journal, takes as long as it took, and round robin takes as long
as the journal of another policy says of it.

The live driver and simulated servers run in virtual time, so that no machine is too slow for them.
Lengths are drawn when a response begins, and again if it starts over, as those of a real model.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from rollout_sched import Prompt, RolloutScheduler
from rollout_sched.config import load_policy
from rollout_sched.core.model.records import DeliveredSample
from rollout_sched.inspection.recording import Recording
from rollout_sched.inspection.replays import recorded_run
from rollout_sched.inspection.run_scenario import run_scenario, run_times
from rollout_sched.inspection.trace_fold import recorded_trace
from rollout_sched.live import LiveScheduler, RunOptions
from rollout_sched.live.ports import InstanceClient, Order
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.simulators.fake_instance.instance import RealtimeInstance
from rollout_sched.simulators.replay import load_scenario
from rollout_sched.simulators.replay.runs import run_policy
from tests import virtual_loop

pytestmark = pytest.mark.usefixtures("files_are_written_at_once")

BASE = load_scenario("qwen7b-8xh100-disaggregated")
PROMPTS_PER_STEP, SAMPLES, STEPS, CAP = 8, 8, 6, 20_000
TRAIN_S, WEIGHTS_S = 8.0, 3.0


def lengths(seed: int) -> Callable[[Order, Any], int]:
    """Log-normal, alike for samples of one prompt, whose effect is in its first token."""
    rng, drawn = random.Random(seed), dict[int, int]()

    def length(order: Order, response: Any) -> int:
        effect = order.token_ids[0] / 1000
        return drawn.setdefault(response.name, min(CAP, int(rng.lognormvariate(effect, 0.5))))

    return length


def prompts() -> list[Prompt]:
    rng = random.Random(0)
    return [
        Prompt(
            uid=f"prompt-{number:03d}",
            prompt_ids=[round(1000 * rng.gauss(7.5, 0.7)), *range(100)],
            samples=SAMPLES,
            max_tokens=CAP,
        )
        for number in range(PROMPTS_PER_STEP * STEPS)
    ]


async def load(client: InstanceClient, version: int) -> None:
    await asyncio.sleep(WEIGHTS_S)


def run(policy: str, record: Path, seed: int) -> float:
    """A trainer that sleeps, and two simulated servers. Seconds of the run."""

    async def scene() -> None:
        length = lengths(seed)
        servers = [RealtimeInstance(name, BASE.instance, length) for name in ("one", "two")]
        async with RolloutScheduler.from_toml(
            policy, servers, prompts_per_step=PROMPTS_PER_STEP, version=0, journal=record
        ) as rollouts:
            await rollouts.submit(prompts())
            await rollouts.close_submissions()
            left = STEPS
            async for batch in rollouts.batches():
                await asyncio.sleep(TRAIN_S)
                left -= 1
                if left:
                    await rollouts.publish_weights(batch.version + 1, load)

    virtual_loop.run(scene())
    return run_times([Recording(record)]).total_s


class Call(TokenPayload):
    """A request of a client, which waits for `ended`."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        super().__init__(prompt_ids, {}, responder=self)
        self.ended = asyncio.Event()

    def answer(self, sample: DeliveredSample) -> None:
        self.ended.set()

    def fail(self, reason: str, error: Exception | None) -> None:
        raise AssertionError(reason)


def run_rounds(policy: str, record: Path, *, updates: bool) -> float:
    """A trainer that knows nothing of us: it asks, waits for every answer, trains, and asks again.
    `updates`: it publishes its weights, and asks when all servers have them."""

    async def scene() -> None:
        length = lengths(1)
        options = RunOptions(prompts_per_step=PROMPTS_PER_STEP, journal=record)
        live = LiveScheduler(load_policy(policy), options)
        for name in ("one", "two"):
            await live.driver.add_instance(RealtimeInstance(name, BASE.instance, length))
        asked = prompts()
        for step in range(STEPS):
            calls = []
            for prompt in asked[step * PROMPTS_PER_STEP :][:PROMPTS_PER_STEP]:
                for _ in range(SAMPLES):
                    calls.append(Call(prompt.prompt_ids))
                    live.driver.submit(calls[-1], len(prompt.prompt_ids), CAP, prompt.uid)
                await asyncio.sleep(0.02)  # the client's own work
            for call in calls:
                await call.ended.wait()
            await asyncio.sleep(TRAIN_S)
            if updates:
                await live.trainer.weights.publish(step + 1, load, wait=True)
        await live.close()

    virtual_loop.run(scene())
    return run_times([Recording(record)]).total_s


def predicted(record: Path, policy: str, seed: int = 0) -> float:
    recordings = [Recording(record)]
    trace, _ = recorded_trace("again", recordings)
    scenario = run_scenario(recordings, trace, BASE).scenario
    again = record.with_name(f"{record.name}-{policy}-{seed}")
    run_policy(load_policy(policy), trace, scenario, seed=seed, journal_path=again)
    return run_times([Recording(again)]).total_s


@pytest.mark.parametrize("policy", ["round_robin_sync", "one_step_off", "areal", "tail_batching"])
def test_a_live_run_is_replayed_from_its_journal(policy: str, tmp_path: Path) -> None:
    took, says = run(policy, tmp_path / "j", seed=1), predicted(tmp_path / "j", policy)
    assert says == pytest.approx(took, rel=0.03)


def test_the_journal_of_a_cutting_policy_predicts_round_robin(tmp_path: Path) -> None:
    """Their lengths are drawn separately, so both are means."""
    took = mean(run("round_robin_sync", tmp_path / f"rr{seed}", seed) for seed in range(3))
    run("tail_batching", tmp_path / "tail", seed=9)
    says = mean(predicted(tmp_path / "tail", "round_robin_sync", seed) for seed in range(4))
    assert says == pytest.approx(took, rel=0.08)


@pytest.mark.parametrize(
    ("policy", "updates"), [("areal", True), ("laminar", False), ("tail_batching", True)]
)
def test_rounds_of_direct_requests_are_replayed(policy: str, updates: bool, tmp_path: Path) -> None:
    """Whatever a policy would do with the groups of a trainer: it had none."""
    record = tmp_path / "j"
    took = run_rounds(policy, record, updates=updates)
    recording = Recording(record)
    found, _ = recorded_run(recording, "", argparse.Namespace(trace=str(record)))
    again = tmp_path / "again"
    run_policy(found.policy, found.trace, found.scenario, journal_path=again)
    says = run_times([Recording(again)])
    assert says.total_s == pytest.approx(took, rel=0.03)
    assert found.scenario.trainer.fixed_s == pytest.approx(TRAIN_S, rel=0.03)
