"""What could not start ends, so that Ray starts it again; what has started goes on."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.integrations.ray import deployment


async def test_only_a_failed_start_ends_the_actor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deployment, "AGAIN_S", 0.0)

    async def fails() -> None:
        raise OSError("address already in use")

    async def starts() -> None: ...

    for start in (starts, fails):
        ended = asyncio.get_running_loop().create_future()
        starting = asyncio.ensure_future(start())
        deployment.end_if_failed(starting, ended.set_result)
        await asyncio.wait([starting])
        if start is fails:
            assert await asyncio.wait_for(ended, 5) == 1
        else:
            await asyncio.sleep(0.01)
            assert not ended.done()
