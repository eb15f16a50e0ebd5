"""GRPOTrainer with completions made in groups by a scheduler in its own process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rollout_sched.client import BlockingRollouts, RolloutScheduler, Sample, Trajectory
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.trl import CheckpointTransfer, RolloutFunc
from tests.neighbours.fleet import Program, fake_instance
from tests.neighbours.trl import fixtures


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fixtures.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def instances() -> Iterator[list[Program]]:
    with ExitStack() as stack:
        yield [stack.enter_context(fake_instance(*fixtures.FAKE)) for _ in range(2)]


def scheduler(
    instances: list[Program], groups: int = 2, policy: str = "round_robin_sync", **rewards: Any
) -> BlockingRollouts:
    urls = [instance.url for instance in instances]
    version = max(weight_version(instance) for instance in instances)
    return RolloutScheduler.from_toml(
        policy, urls, prompts_per_step=groups, version=version, **rewards
    ).blocking()


def weight_version(instance: Program) -> int:
    """0 while it was not given any."""
    told = str(instance.get("/weight_info")["weight_version"])
    return int(told) if told.isdecimal() else 0


def test_it_trains_and_its_weights_arrive(
    model: Path, instances: list[Program], tmp_path: Path
) -> None:
    seen: list[Any] = []

    def reward(prompts: list[str], **columns: Any) -> list[float]:
        seen.append(prompts)
        return fixtures.reward_even(**columns)

    with scheduler(instances) as rollouts:
        begin = rollouts.state()["version"]
        weights = CheckpointTransfer(rollouts, tmp_path / "weights")
        trainer = fixtures.trainer(
            model,
            fixtures.config(tmp_path, max_steps=3),
            reward,
            rollout_func=RolloutFunc(rollouts, weights=weights),
        )
        before = fixtures.copy_of(trainer.model)
        trainer.train()
        assert trainer.state.global_step == 3
        assert fixtures.moved(before, trainer.model)
        state = rollouts.state()
    assert all(len(prompts) == 4 and prompts[0] == prompts[1] for prompts in seen)
    assert (state["version"], state["batches"], state["groups"]["delivered"]) == (begin + 3, 3, 6)
    assert state["anomalies"] == {}
    assert {weight_version(instance) for instance in instances} == {begin + 3}
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == [
        str(begin + number) for number in (2, 3)
    ], "older folders are deleted"


def test_evaluation_has_groups_of_its_own_size(
    model: Path, instances: list[Program], tmp_path: Path
) -> None:
    with scheduler(instances, groups=1) as rollouts:
        trainer = fixtures.trainer(
            model,
            fixtures.config(
                tmp_path,
                num_generations_eval=1,
                per_device_eval_batch_size=2,
                eval_strategy="steps",
                eval_steps=1,
                max_steps=1,
            ),
            eval_dataset=fixtures.dataset(fixtures.PROMPTS[:2]),
            rollout_func=RolloutFunc(rollouts),
        )
        trainer.train()
        assert rollouts.state()["groups"]["delivered"] == 2 + 2
    assert any("eval_reward" in line for line in trainer.state.log_history)


def test_messages_and_a_tool(model: Path, instances: list[Program], tmp_path: Path) -> None:
    """What the tool returns is masked out, and messages go through the chat template."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    returned = [5, 6, 7]

    async def tool(trajectory: Trajectory) -> list[int] | None:
        return returned if trajectory.turn == 1 else None

    made: list[Any] = []
    with scheduler(instances) as rollouts:
        func = RolloutFunc(rollouts, tool=tool)

        def keep(prompts: list[Any], trainer: Any) -> dict[str, Any]:
            columns = func(prompts, trainer)
            made.append((prompts, columns))
            return columns

        messages = [[{"role": "user", "content": text}] for text in fixtures.PROMPTS]
        trainer = fixtures.trainer(
            model,
            fixtures.config(
                tmp_path,
                max_steps=1,
                max_completion_length=400,
                generation_kwargs={"extra_args": {"fake_response_tokens": 3}},
            ),
            train_dataset=fixtures.dataset(messages),
            rollout_func=keep,
        )
        trainer.train()
    ((prompts, columns),) = made
    for prompt, ids in zip(prompts, columns["prompt_ids"], strict=True):
        assert (
            ids
            == tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=True, return_dict=True
            )["input_ids"]
        )
    for ids, mask, log_probs in zip(
        columns["completion_ids"], columns["env_mask"], columns["logprobs"], strict=True
    ):
        assert len(ids) == len(mask) == len(log_probs)
        assert [token for token, one in zip(ids, mask, strict=True) if not one] == returned


def test_a_batch_that_is_not_the_trainer_s(
    model: Path, instances: list[Program], tmp_path: Path
) -> None:
    with scheduler(instances, groups=3) as rollouts:
        trainer = fixtures.trainer(
            model, fixtures.config(tmp_path), rollout_func=RolloutFunc(rollouts)
        )
        with pytest.raises(CallerError, match="start the scheduler with prompts_per_step=2"):
            trainer.train()


def test_what_cannot_be_generated_is_said(
    model: Path, instances: list[Program], tmp_path: Path
) -> None:
    with scheduler(instances) as rollouts:
        args = fixtures.config(tmp_path, generation_kwargs={"temperature": -1.0})
        trainer = fixtures.trainer(model, args, rollout_func=RolloutFunc(rollouts))
        with pytest.raises(CallerError, match="could not be generated"):
            trainer.train()


@pytest.mark.parametrize("prompts", [["a", "b", "a", "b"], ["a", "a", "b"]])
def test_prompts_that_do_not_come_in_groups(
    model: Path, instances: list[Program], tmp_path: Path, prompts: list[str]
) -> None:
    with scheduler(instances) as rollouts:
        func = RolloutFunc(rollouts)
        trainer = fixtures.trainer(model, fixtures.config(tmp_path), rollout_func=func)
        with pytest.raises(CallerError, match="2 times in a row"):
            func(prompts, trainer)


def test_adapters_are_refused(model: Path, instances: list[Program], tmp_path: Path) -> None:
    with scheduler(instances) as rollouts:
        func = RolloutFunc(rollouts, weights=CheckpointTransfer(rollouts, tmp_path))
        trainer = fixtures.trainer(model, fixtures.config(tmp_path), rollout_func=func)
        trainer.model.peft_config = {}
        with pytest.raises(CallerError, match="adapters are not merged"):
            trainer.train()


async def length(sample: Sample) -> float:
    return float(len(sample.response_ids))


def test_the_reward_of_the_scheduler_is_handed_on(
    model: Path, instances: list[Program], tmp_path: Path
) -> None:
    seen: list[list[float]] = []

    def same(reward: list[float], completion_ids: list[list[int]], **_: Any) -> list[float]:
        assert reward == [float(len(ids)) for ids in completion_ids]
        seen.append(reward)
        return reward

    with scheduler(instances, reward=length) as rollouts:
        args = fixtures.config(tmp_path, max_steps=1)
        trainer = fixtures.trainer(model, args, same, rollout_func=RolloutFunc(rollouts))
        trainer.train()
    assert seen


def test_a_trainer_that_waits_for_every_prompt_takes_no_filter(
    model: Path, instances: list[Program], tmp_path: Path
) -> None:
    with scheduler(instances, reward=length, keep=lambda samples: False) as rollouts:
        func = RolloutFunc(rollouts)
        trainer = fixtures.trainer(model, fixtures.config(tmp_path), rollout_func=func)
        with pytest.raises(CallerError, match="filtered, but this trainer needs every prompt"):
            trainer.train()
