"""Scheduling in the trainer's own process: what it says of instances at the start."""

from __future__ import annotations

import pytest

from rollout_sched.client import RolloutScheduler
from rollout_sched.core.errors import CallerError


async def test_unready_servers_are_named(caplog: pytest.LogCaptureFixture) -> None:
    url = "http://127.0.0.1:1"
    async with RolloutScheduler.from_toml("dplb", [url]) as rollouts:
        assert f"instance {url}: away, joins when it is ready" in caplog.text
        waits_for = (await rollouts.state())["waits_for"]
        assert waits_for["batch"].startswith(f"no instance has joined: {url} (")


def test_single_url_is_refused_as_a_list() -> None:
    with pytest.raises(CallerError, match=r"give a list: \['http://a:1'\]"):
        RolloutScheduler.from_toml("dplb", "http://a:1")


async def test_the_mistake_of_a_clients_base_url_is_named() -> None:
    with pytest.raises(CallerError, match="leave out /v1"):
        await RolloutScheduler.from_toml("dplb", ["http://a:1/v1"]).__aenter__()


async def test_a_forgotten_async_with_is_named() -> None:
    rollouts = RolloutScheduler.from_toml("dplb", ["http://127.0.0.1:1"])
    for call in (rollouts.submit([]), rollouts.next_batch(), rollouts.state()):
        with pytest.raises(CallerError, match="use `async with`"):
            await call
