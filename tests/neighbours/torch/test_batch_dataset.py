"""Batches from a gateway by a DataLoader, without workers and with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import pytest
from torch.utils.data import DataLoader

from rollout_sched.client import Applied, BlockingRollouts, Prompt, RolloutScheduler
from rollout_sched.integrations.torch import BatchDataset, padded
from rollout_sched.live.trainer.samples import Batch
from tests.neighbours.fleet import Fleet, fleet

GROUPS = 6


@pytest.fixture
def ours() -> Iterator[Fleet]:
    serve = ["--prompts-per-step", "2"]
    with fleet(1, policy="round_robin_sync", fake=["--speed", "100"], serve=serve) as running:
        yield running


def opened(url: str) -> BlockingRollouts:
    return RolloutScheduler.connect(url).blocking()


def submit(rollouts: BlockingRollouts) -> None:
    rollouts.submit(Prompt(f"g{n}", [1, 2, 3], 2, 8) for n in range(GROUPS))
    rollouts.close_submissions()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_each_batch_once_and_under_its_own_version(ours: Fleet, workers: int) -> None:
    loader = DataLoader(
        BatchDataset(partial(opened, ours.url)),
        batch_size=None,
        num_workers=workers,
        collate_fn=partial(padded, pad_token_id=0),
    )
    got = []
    with opened(ours.url) as rollouts:
        submit(rollouts)
        for batch in loader:
            got.append((batch["number"].item(), batch["version"].item(), len(batch["groups"])))
            rollouts.publish_weights(batch["version"].item() + 1, Applied(), wait=True)
        assert rollouts.state()["groups"]["delivered"] == GROUPS
    assert got == [(0, 0, 4), (1, 1, 4), (2, 2, 4)]


def test_several_batches_of_one_version(ours: Fleet) -> None:
    """The trainer publishes after every third one: a worker that waited for more would hang."""
    dataset = BatchDataset(partial(opened, ours.url), batches_per_version=3)
    with opened(ours.url) as rollouts:
        submit(rollouts)
        loader = DataLoader(dataset, batch_size=None, num_workers=1)
        versions = [batch.version for batch in loader]
    assert versions == [0, 0, 0]


def test_a_trainer_that_goes_on_from_a_checkpoint(ours: Fleet) -> None:
    first = BatchDataset(partial(opened, ours.url))
    with opened(ours.url) as rollouts:
        submit(rollouts)
    assert next(iter(first)).number == 0
    state = first.state_dict()
    again = BatchDataset(partial(opened, ours.url))
    assert next(iter(again)).number == 0, "nobody has said to have received it"
    again.load_state_dict(state)
    assert [batch.number for batch in again] == [1, 2]


def test_parts_of_batches(tmp_path_factory: pytest.TempPathFactory) -> None:
    """In this process; the state counts whole batches only."""
    policy = tmp_path_factory.mktemp("policy") / "streamed.toml"
    policy.write_text('[batching]\nuse = "sync"\npart_prompts = 1\n')
    with fleet(1, policy=str(policy), serve=["--prompts-per-step", "2"]) as ours:
        dataset = BatchDataset(partial(opened, ours.url), parts=True)
        with opened(ours.url) as rollouts:
            submit(rollouts)
        seen: list[Batch] = []
        for part in dataset:
            seen.append(part)
            assert dataset.state_dict()["received"] == (
                part.number if part.last else part.number - 1 if part.number else None
            )
        assert sum(part.last for part in seen) == 3
        assert sorted(sample.uid for part in seen for sample in part.samples) == sorted(
            2 * [f"g{n}" for n in range(GROUPS)]
        )


def test_a_scheduler_of_this_process_is_not_for_workers() -> None:
    with RolloutScheduler.from_toml("round_robin_sync").blocking() as rollouts:
        loader = DataLoader(
            BatchDataset(lambda: nullcontext(rollouts)), batch_size=None, num_workers=1
        )
        with pytest.raises(Exception, match="connect to a gateway from here"):
            next(iter(loader))
