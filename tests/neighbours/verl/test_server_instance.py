"""One of verl's servers, an actor of Ray's, as an instance."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray

from rollout_sched.integrations.verl.server_instance import ServerInstance
from rollout_sched.live.ports import InstanceGone, Order, Output, RequestRejected

#: Seconds that anything here may take, on a machine that does much else besides.
PATIENCE_S = 300.0

pytestmark = pytest.mark.real_time(PATIENCE_S)

ADDRESS = "127.0.0.1:1"


@pytest.fixture(scope="module")
def shared(cluster: None, engine: Any) -> Any:
    return engine.EngineServer.remote()


@pytest.fixture
def server(shared: Any) -> Any:
    ray.get(shared.reset.remote(3), timeout=PATIENCE_S)
    return shared


def order(name: str, prompt: int = 4, most: int = 20, **sampling: Any) -> Order:
    return Order(name, [1] * prompt, most, "", {"temperature": 1.0, **sampling})


async def until_running(server: Any, requests: int) -> None:
    while await server.running.remote() != requests:
        await asyncio.sleep(0.01)


async def test_a_server_describes_itself(engine, server):
    told = await ServerInstance(ADDRESS, server).describe()
    assert (told.slots, told.kv_tokens) == (engine.SLOTS, engine.KV_TOKENS)
    assert told.max_model_len == engine.MAX_MODEL_LEN
    assert told.version == 3
    assert told.paused is False
    assert told.started_at > 0


async def test_an_answer_has_its_version_and_log_probs_if_asked_for(server):
    instance = ServerInstance(ADDRESS, server)
    await server.let_go.remote()
    assert await instance.generate(order("a", logprobs=0)) == Output(
        [3] * 20, [-0.5] * 20, "length", ((3, 20),)
    )
    assert (await instance.generate(order("b"))).logprobs is None
    assert (await instance.gauges()).generated_tokens == 40


async def test_one_request_is_aborted_with_what_it_has_and_others_go_on(engine, server):
    instance = ServerInstance(ADDRESS, server)
    a, b = (asyncio.create_task(instance.generate(order(name))) for name in "ab")
    await until_running(server, 2)
    assert (await instance.gauges()).waiting == 2
    await instance.abort("a")
    made = await a
    assert (made.finish, made.spans) == ("abort", ((3, engine.HALF),))
    assert not b.done()
    await instance.pause("abort", True)
    assert (await b).finish == "abort"


async def test_pauses_and_weights_of_verl_are_seen(server):
    instance = ServerInstance(ADDRESS, server)
    await server.abort_all_requests.remote()
    assert await instance.is_paused() is True
    await server.set_global_steps.remote(4)
    await server.resume_generation.remote()
    assert await instance.is_paused() is False
    assert await instance.weight_version() == 4


async def test_errors_are_split_by_whose_fault_they_are(engine, server):
    instance = ServerInstance(ADDRESS, server)
    with pytest.raises(RequestRejected, match="leaves no room"):
        await instance.generate(order("a", prompt=engine.MAX_MODEL_LEN))
    dead = engine.EngineServer.remote()
    ray.kill(dead)
    with pytest.raises(InstanceGone):
        await ServerInstance(ADDRESS, dead).describe()
