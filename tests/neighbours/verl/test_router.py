"""Our placement as verl loads it, before servers that are Ray actors, through verl's own client."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import yaml
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import get_router_handle

pytestmark = pytest.mark.usefixtures("cluster")

#: Seconds that anything here may take, on a machine that does much else besides.
PATIENCE_S = 300.0


@ray.remote(num_cpus=0)
class Server:
    """As verl's, but that its answers wait until they are let go; each is the server's number, in
    the fields of a TokenOutput without the seconds that importing it takes."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._open = asyncio.Event()
        self._asked = 0

    async def generate(self, request_id: str, prompt_ids: list[int], **others: Any) -> Any:
        self._asked += 1
        await self._open.wait()
        return SimpleNamespace(token_ids=[self._number], extra_fields={})

    async def let_go(self) -> None:
        self._open.set()

    async def asked(self) -> int:
        return self._asked


@pytest.fixture
def servers() -> dict[str, Any]:
    return {f"127.0.0.1:{number}": Server.remote(number) for number in (1, 2)}


def router(folder: Path, servers: dict[str, Any], **keys: Any) -> Any:
    policy = folder / "sessions.toml"
    policy.write_text('[routing]\nuse = "session_affinity"\n')
    config = {
        "router_class": "rollout_sched.integrations.verl.router.Router",
        "policy": str(policy),
        "slots": 1,
        "kv_tokens": 10_000,
        "max_tokens": 100,
        **keys,
    }
    path = folder / "router.yaml"
    path.write_text(yaml.safe_dump(config))
    return get_router_handle(servers, router_config_path=str(path))


async def generate(client: LLMServerClient, request_id: str, tokens: int = 5) -> int:
    output = await client.generate(
        request_id, prompt_ids=[1] * tokens, sampling_params={"max_tokens": 10}
    )
    return output.token_ids[0]


@pytest.mark.real_time
async def test_requests_wait_for_a_place_and_turns_stay_where_they_were(tmp_path, servers, config):
    handle = router(tmp_path, servers)
    client = LLMServerClient(config, handle)
    calls = [asyncio.create_task(generate(client, f"s{n}")) for n in range(4)]
    while sum(await asyncio.gather(*[s.asked.remote() for s in servers.values()])) < 2:
        await asyncio.sleep(0.01)
    status = await handle.get_status.remote()
    assert status["servers"] == dict.fromkeys(servers, 1), "two wait in the router"
    assert await handle.get_total_inflight.remote() == 2
    await asyncio.gather(*[server.let_go.remote() for server in servers.values()])
    first = await asyncio.gather(*calls)
    assert sorted(first) == [1, 1, 2, 2]
    again = [await generate(client, f"s{n}") for n in range(4)]
    assert again == first


@pytest.mark.real_time
async def test_servers_come_and_go(tmp_path, servers, config):
    one, two = servers
    await asyncio.gather(*[server.let_go.remote() for server in servers.values()])
    handle = router(tmp_path, {one: servers[one]})
    client = LLMServerClient(config, handle)
    assert await generate(client, "s") == 1
    await handle.add_servers.remote({two: servers[two]})
    await handle.remove_servers.remote([one])
    assert await handle.get_all_servers.remote() == [two]
    assert await generate(client, "s") == 2
    await handle.remove_servers.remote([two])
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        await generate(client, "s")


def test_a_wrong_key_is_named(tmp_path, servers):
    handle = router(tmp_path, servers, slotz=1)
    with pytest.raises(Exception, match="slotz"):
        ray.get(handle.get_all_servers.remote(), timeout=PATIENCE_S)
