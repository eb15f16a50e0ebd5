"""The same calls without coroutines: what they return, raise and leave behind."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout_sched.client import (
    Applied,
    Batch,
    BlockingRollouts,
    Prompt,
    RolloutScheduler,
    Trajectory,
)
from rollout_sched.core.errors import CallerError
from rollout_sched.live.ports import InstanceError, Order, Output
from tests.live.scripted import Scripted


class Eager(Scripted):
    """Answers each order at once."""

    async def generate(self, order: Order, on_tokens: Any = None) -> Output:
        return Output([5, 6], None, "stop")


@contextmanager
def rollouts_of(
    policy: str | Path = "round_robin_sync", **other: Any
) -> Iterator[BlockingRollouts]:
    options: dict[str, Any] = {"prompts_per_step": 1, **other}
    with RolloutScheduler.from_toml(policy, [Eager()], **options).blocking() as rollouts:
        yield rollouts


def prompts(*uids: str) -> list[Prompt]:
    return [Prompt(uid, [1, 2], 1, 9) for uid in uids]


def test_a_training_loop() -> None:
    before = threading.active_count()
    with rollouts_of() as rollouts:
        rollouts.submit(prompts("a", "b"))
        rollouts.close_submissions()
        got = []
        for batch in rollouts.batches():
            got.append([(s.uid, s.response_ids, s.versions) for s in batch.samples])
            rollouts.publish_weights(batch.version + 1, Applied(), wait=True)
        assert got == [[("a", [5, 6], [0, 0])], [("b", [5, 6], [1, 1])]]
        assert rollouts.state()["version"] == 2
        assert rollouts.next_batch() is None
    assert threading.active_count() == before


def test_a_batch_in_parts(tmp_path: Path) -> None:
    policy = tmp_path / "streamed.toml"
    policy.write_text('[batching]\nuse = "sync"\npart_prompts = 1\n')
    with rollouts_of(policy, prompts_per_step=2) as rollouts:
        rollouts.submit(prompts("a", "b"))
        rollouts.close_submissions()
        parts = list(rollouts.parts())
        assert sorted(sample.uid for part in parts for sample in part.samples) == ["a", "b"]
        assert [part.last for part in parts[:-1]] == [False] * (len(parts) - 1)


def test_errors_reach_the_caller() -> None:
    with rollouts_of() as rollouts:
        with pytest.raises(CallerError, match="'a' was already submitted"):
            rollouts.submit([*prompts("a"), Prompt("a", [9], 1, 9)])
        with pytest.raises(CallerError, match="no instance"):
            rollouts.remove_instance("http://nobody:1")
        with pytest.raises(InstanceError):
            rollouts.add_instance("http://127.0.0.1:1")
        with pytest.raises(CallerError, match="is not lent"):
            rollouts.return_instance("i0")


def test_it_is_used_within_with() -> None:
    rollouts = RolloutScheduler.from_toml("round_robin_sync", []).blocking()
    with pytest.raises(CallerError, match="`with`"):
        rollouts.state()
    with rollouts:
        assert rollouts.state()["version"] == 0
    with pytest.raises(CallerError, match="`with`"):
        rollouts.state()


def test_failed_entry_leaves_no_thread() -> None:
    before = threading.active_count()
    twice = [Scripted("a"), Scripted("a")]
    with (
        pytest.raises(CallerError, match="here already"),
        RolloutScheduler.from_toml("round_robin_sync", twice).blocking(),
    ):
        pass
    assert threading.active_count() == before


def test_a_tool_cannot_call_back() -> None:
    """It would wait for the loop that it runs in."""
    with rollouts_of() as rollouts:

        async def tool(trajectory: Trajectory) -> None:
            rollouts.state()

        rollouts.submit(prompts("a"), tool=tool)
        rollouts.close_submissions()
        batch = rollouts.next_batch()
        (failed,) = batch.failed
        assert "event loop that this call would wait for" in failed.reason


def test_background_work_runs_beside_the_caller() -> None:
    async def first_batch(rollouts: RolloutScheduler) -> Batch | None:
        return await rollouts.next_batch()

    with rollouts_of() as rollouts:
        future = rollouts.start(first_batch)
        assert not future.done()
        rollouts.submit(prompts("a"))
        batch = future.result(20)
        assert batch.samples[0].uid == "a"
        endless = rollouts.start(first_batch)
        assert endless.cancel()
        assert rollouts.state()["batches"] == 1


def test_trained_batches_are_not_repeated_after_a_checkpoint() -> None:
    with rollouts_of() as rollouts:
        rollouts.submit(prompts("a", "b"))
        first = rollouts.next_batch()
        rollouts.acknowledge(first.number)
        second = rollouts.next_batch()
        assert second.samples[0].uid == "b"


def test_a_fork_has_no_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    with rollouts_of() as rollouts:
        with monkeypatch.context() as patched:
            patched.setattr("os.getpid", lambda: -1)
            with pytest.raises(CallerError, match="connect to a gateway"):
                rollouts.state()
        assert rollouts.state()["batches"] == 0


def test_a_wait_that_is_broken_off_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes while a batch is waited for: the next question gets it all the same."""
    with rollouts_of(prompts_per_step=2) as rollouts:
        rollouts.submit(prompts("a"))
        broken_off = []

        def interrupt(future: Any) -> Any:
            broken_off.append(future)
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr("concurrent.futures.Future.result", interrupt)
            with pytest.raises(KeyboardInterrupt):
                rollouts.next_batch()
        assert broken_off[0].cancelled()
        rollouts.submit(prompts("b"))
        batch = rollouts.next_batch()
        assert len(batch.samples) == 2


def test_every_call_of_the_interface_is_there_with_its_signature() -> None:
    calls = {
        name: call
        for name, call in vars(RolloutScheduler).items()
        if inspect.iscoroutinefunction(call) and not name.startswith("_")
    }
    assert len(calls) == 9
    for name, call in calls.items():
        assert inspect.signature(getattr(BlockingRollouts, name)) == inspect.signature(call)
