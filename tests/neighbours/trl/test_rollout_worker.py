"""AsyncGRPOTrainer's side of the worker: TRL's own queue data set takes what the worker puts there.

The trainer itself needs a GPU (tree attention).
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig
from trl.experimental.async_grpo.async_grpo_trainer import RolloutQueueDataset

from rollout_sched.client import BlockingRollouts, RolloutScheduler, Sample, Trajectory
from rollout_sched.integrations.trl import CheckpointTransfer, RolloutWorker
from tests.neighbours.fleet import fake_instance
from tests.neighbours.trl import fixtures


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fixtures.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rollouts() -> Iterator[BlockingRollouts]:
    with (
        fake_instance(*fixtures.FAKE) as instance,
        RolloutScheduler.from_toml("areal", [instance.url], prompts_per_step=2).blocking() as ours,
    ):
        yield ours


def worker_of(
    rollouts: BlockingRollouts, model: Path, *rewards: Any, tool: Any = None, **options: Any
) -> RolloutWorker:
    args = AsyncGRPOConfig(
        output_dir="unused",
        use_cpu=True,
        bf16=False,
        num_generations=fixtures.GENERATIONS,
        max_completion_length=options.pop("tokens", fixtures.COMPLETION_TOKENS),
        **options,
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    reward_funcs = rewards or (fixtures.reward_even,)
    return RolloutWorker(rollouts, fixtures.dataset(), reward_funcs, tokenizer, args, tool=tool)


def taken(worker: RolloutWorker, samples: int) -> list[Any]:
    return [worker.rollout_buffer.get(timeout=fixtures.WAIT_S) for _ in range(samples)]


def test_a_training_run(rollouts: BlockingRollouts, model: Path, tmp_path: Path) -> None:
    """In the order of AsyncGRPOTrainer: weights, the worker, then steps and weights in turn."""
    weights = CheckpointTransfer(rollouts, tmp_path)
    worker = worker_of(rollouts, model)
    parameters = AutoModelForCausalLM.from_pretrained(model)
    metrics: dict[str, list[Any]] = defaultdict(list)
    version = 0

    def sync() -> None:
        nonlocal version
        weights.pause()
        weights.send_weights(parameters.named_parameters())
        weights.resume()
        version += 1
        worker.update_model_version(version)

    weights.init_weight_transfer()
    sync()
    worker.start()
    source = RolloutQueueDataset(
        worker.rollout_buffer,
        lambda: version,
        worker.check_health,
        stale_after_s=fixtures.WAIT_S,
        metrics=metrics,
        poll_interval_s=0.5,
        max_staleness=10,
    )
    samples = iter(source)
    groups: list[int] = []
    for _ in range(3):
        step = [next(samples) for _ in range(2 * fixtures.GENERATIONS)]
        groups += {sample["group_id"] for sample in step}
        sync()
    worker.stop()
    weights.destroy()
    assert len(set(groups)) == len(groups) == 6, "each group in one step only"
    assert rollouts.state()["version"] == version == 4
    assert min(metrics["sample/staleness_mean"]) >= 0
    told = worker.metrics_queue.get_nowait()
    assert told["completions/mean_length"] == (4 * fixtures.COMPLETION_TOKENS, 4)


def test_what_a_sample_is(rollouts: BlockingRollouts, model: Path) -> None:
    worker = worker_of(rollouts, model)
    worker.update_model_version(7)  # TRL's count, while the scheduler's is at 0
    worker.start()
    samples = taken(worker, 4)
    worker.stop()
    for sample in samples:
        prompt = len(sample.input_ids) - fixtures.COMPLETION_TOKENS
        assert sample.completion_mask.tolist() == [0] * prompt + [1] * fixtures.COMPLETION_TOKENS
        assert sample.old_log_probs[:prompt].tolist() == [0.0] * prompt
        assert (sample.old_log_probs[prompt:] < 0).all()
        assert (sample.input_ids.dtype, sample.old_log_probs.dtype) == (np.int64, np.float32)
        assert sample.model_version == 7
        response = sample.input_ids[prompt:].tolist()
        assert sample.metrics["reward"] == fixtures.reward_even([response], [1.0])[0]
        assert sample.prompt in fixtures.PROMPTS
        assert isinstance(sample.completion, str)
    by_group = itertools.groupby(samples, key=lambda sample: sample.group_id)
    sums = [sum(sample.advantage for sample in group) for _, group in by_group]
    assert sums == pytest.approx([0.0, 0.0], abs=1e-6)


def test_what_a_tool_returned_is_not_trained(rollouts: BlockingRollouts, model: Path) -> None:
    async def tool(trajectory: Trajectory) -> list[int] | None:
        return [5, 6, 7] if trajectory.turn == 1 else None

    # Long enough that a response stops by itself.
    worker = worker_of(rollouts, model, tool=tool, tokens=100_000)
    worker.start()
    for sample in taken(worker, 4):
        first = np.flatnonzero(sample.completion_mask)[0]
        between = sample.input_ids[first:][sample.completion_mask[first:] == 0]
        assert between.tolist() == [5, 6, 7]
    worker.stop()


def test_it_waits_until_the_trainer_has_taken_all(rollouts: BlockingRollouts, model: Path) -> None:
    worker = worker_of(rollouts, model)
    worker.start()
    taken(worker, 3)
    fixtures.wait_until(lambda: worker.rollout_buffer.qsize() == 1)
    assert rollouts.state()["batches"] == 1
    taken(worker, 1 + 4)
    worker.stop()
    assert rollouts.state()["batches"] >= 2


def test_a_reward_function_that_raises_ends_it(rollouts: BlockingRollouts, model: Path) -> None:
    def fail(**_: Any) -> list[float]:
        raise ValueError("boom")

    worker = worker_of(rollouts, model, fail)
    worker.start()
    fixtures.wait_until(lambda: raises(worker))
    with pytest.raises(RuntimeError, match="rollouts have ended") as caught:
        worker.check_health(fixtures.WAIT_S)
    assert "boom" in str(caught.value.__cause__)


def test_prompts_of_which_none_can_be_rolled_out_end_it(
    rollouts: BlockingRollouts, model: Path
) -> None:
    worker = worker_of(rollouts, model, tool=failing_tool, tokens=100_000)
    worker.start()
    fixtures.wait_until(lambda: raises(worker))
    with pytest.raises(RuntimeError) as caught:
        worker.check_health(fixtures.WAIT_S)
    assert "all prompts fail" in str(caught.value.__cause__)


def test_health(rollouts: BlockingRollouts, model: Path) -> None:
    worker = worker_of(rollouts, model)
    with pytest.raises(RuntimeError, match="have ended"):
        worker.check_health(fixtures.WAIT_S)
    worker.start()
    worker.check_health(fixtures.WAIT_S)
    stuck, go_on = threading.Event(), threading.Event()

    async def hold_up(_: RolloutScheduler) -> None:
        stuck.set()
        go_on.wait(fixtures.WAIT_S)

    held_up = rollouts.start(hold_up)
    assert stuck.wait(fixtures.WAIT_S)
    with pytest.raises(RuntimeError, match="no answer from the scheduler"):
        worker.check_health(0.1)
    go_on.set()
    held_up.result(fixtures.WAIT_S)
    worker.check_health(fixtures.WAIT_S)
    worker.stop()


async def failing_tool(trajectory: Trajectory) -> None:
    raise ValueError("no sandbox")


def raises(worker: RolloutWorker) -> bool:
    try:
        worker.check_health(fixtures.WAIT_S)
    except RuntimeError:
        return True
    return False


def test_rewards_of_the_scheduler_count_and_what_it_filters_is_made_up_for(model: Path) -> None:
    async def length(sample: Sample) -> float:
        return float(len(sample.response_ids))

    async def second_in_two(samples: Sequence[Sample]) -> bool:
        seen.add(samples[0].uid)
        return len(seen) % 2 == 0

    seen: set[str] = set()
    with fake_instance(*fixtures.FAKE) as instance:
        scheduler = RolloutScheduler.from_toml(
            "areal", [instance.url], prompts_per_step=2, reward=length, keep=second_in_two
        )
        with scheduler.blocking() as rollouts:
            worker = worker_of(rollouts, model, lambda **columns: [0.0] * fixtures.GENERATIONS)
            worker.start()
            got = taken(worker, 4 * fixtures.GENERATIONS)
            worker.stop()
    assert len({sample.group_id for sample in got}) == 4
    for sample in got:
        made = sum(sample.completion_mask)
        assert sample.metrics["rewards/scheduler"] == sample.metrics["reward"] >= made > 0
    assert len(seen) >= 8
