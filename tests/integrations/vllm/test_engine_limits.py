"""How an engine was started, as far as a server tells."""

from __future__ import annotations

import asyncio

from rollout_sched.integrations.vllm.detection import EngineLimits, read_limits
from rollout_sched.integrations.vllm.http_instance import HttpInstance
from tests.simulators.fake_instance.served import served


def limits(path_of: str = "") -> EngineLimits:
    async def read() -> EngineLimits:
        async with served() as client:
            instance = HttpInstance(f"http://127.0.0.1:{client.port}{path_of}")
            try:
                return await read_limits(instance.control)
            finally:
                await instance.close()

    return asyncio.run(read())


def test_all_of_them_in_the_development_mode() -> None:
    assert limits() == EngineLimits(4, True, 512, "0.32.0")


def test_what_is_not_told_is_not_known() -> None:
    assert limits("/nowhere") == EngineLimits()
