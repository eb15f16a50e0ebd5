"""A trainer changes the weights of two real servers by calls to the gateway, as if it were one.

Weights travel by the tests' own backend (`disk_transfer`), for vLLM's need GPUs, or are reloaded
from disk. Every token's version must be what the server's own spans say, and every token what those
weights make.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.gateway.serve import Service
from tests.vllm import disk_transfer, servers

DICE = random.Random(11)
PROMPTS = [[DICE.randrange(3, 2000) for _ in range(100)] for _ in range(6)]
TOKENS = 400
LIMIT_S = 240


@pytest.fixture(scope="module")
def urls(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    plugin, logs = tmp_path_factory.mktemp("plugin"), tmp_path_factory.mktemp("logs")
    disk_transfer.install(plugin)
    backend = f'{{"backend": "{disk_transfer.NAME}"}}'
    flags = ["--enable-scale-out", "--weight-transfer-config", backend]
    with ExitStack() as stack:
        both = [
            stack.enter_context(
                servers.serving(
                    models[0], logs, *flags, dev_mode=True, core=core, PYTHONPATH=str(plugin)
                )
            )
            for core in range(2)
        ]
        yield [server.wait() for server in both]


class Trainer:
    """Knows one server, the gateway."""

    def __init__(
        self, service: Service, session: aiohttp.ClientSession, urls: Sequence[str]
    ) -> None:
        self.service = service
        self._session = session
        self._urls = urls

    async def post(self, path: str, body: Any = None, url: str = "") -> Any:
        address = f"{url or self.service.url}{path}"
        async with self._session.post(address, json=body or {}) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def get(self, path: str, url: str = "") -> Any:
        async with self._session.get(f"{url or self.service.url}{path}") as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def generate(
        self, prompt: list[int], tokens: int = TOKENS, url: str = "", salt: str = ""
    ) -> Any:
        sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": tokens}
        body: Any = {"token_ids": prompt, "sampling_params": sampling}
        if salt:
            body["cache_salt"] = salt
        return await self.post("/inference/v1/generate", body, url)

    @property
    def version(self) -> int:
        return int(self.service.live.driver.view.run.version)

    async def until_generated(self, tokens: int) -> None:
        """Until the servers have generated so many more. They are asked themselves: the gateway's
        last poll may lack the end of what was generated before."""
        before = await self._generated()
        while await self._generated() < before + tokens:
            await asyncio.sleep(0.02)

    async def _generated(self) -> float:
        total = 0.0
        for url in self._urls:
            async with self._session.get(f"{url}/metrics") as response:
                families = text_string_to_metric_families(await response.text())
            samples = [sample for family in families for sample in family.samples]
            total += sum(s.value for s in samples if s.name == "vllm:generation_tokens_total")
        return total


@asynccontextmanager
async def trainer(
    urls: list[str], policy: str = "dplb", roots: Sequence[Path] = ()
) -> AsyncIterator[Trainer]:
    """At the version that the servers have."""
    options = Options(
        policy=policy,
        instances=urls,
        port=0,
        start_version="auto",
        grace_s=1.0,
        live={"poll_s": 0.1},
        weights_roots=list(roots),
    )
    service = Service(options, lambda line: None)
    try:
        await service.open()
        async with aiohttp.ClientSession() as session:
            yield Trainer(service, session, urls)
        assert not service.live.driver.view.anomalies
    finally:
        await service.close()


def segments(answer: Any) -> list[tuple[str, int, int]]:
    """What we say of an answer's tokens, as vLLM would word it."""
    told = answer["rollout_sched"]["segments"]
    return [(str(one["version"]), one["start"], one["end"]) for one in told]


def spans(answer: Any) -> list[tuple[str, int, int]]:
    told = answer["choices"][0]["weight_versions"]
    return [(one["version"], one["start"], one["end"]) for one in told]


async def by_transfer(trainer: Trainer, model: Path) -> None:
    """vLLM's own four calls, with what a trainer does around them."""
    await trainer.post("/init_weight_transfer_engine", {"init_info": {}})
    await trainer.post("/pause?mode=keep&clear_cache=true")
    await trainer.post("/start_weight_update")
    file = {"path": f"{model}/../{model.name}/model.safetensors"}
    await trainer.post("/update_weights", {"update_info": file})
    await trainer.post("/finish_weight_update")
    await trainer.post("/resume")


async def from_disk(trainer: Trainer, model: Path) -> None:
    await trainer.post("/pause?mode=keep&clear_cache=true")
    rpc = {"method": "reload_weights", "kwargs": {"weights_path": f"{model}/../{model.name}"}}
    await trainer.post("/collective_rpc", rpc)
    await trainer.post("/resume")


@pytest.mark.parametrize("update", [by_transfer, from_disk])
def test_versions_are_the_servers_own_and_tokens_those_of_the_weights(
    update: Any, urls: list[str], models: list[Path]
) -> None:
    async def scene() -> None:
        roots = [model.parent for model in models]
        async with trainer(urls, roots=roots) as ours:
            start = ours.version
            assert (await ours.get("/get_world_size"))["world_size"] == 2
            alone = await asyncio.gather(
                *(ours.generate(ids, url=urls[0], salt=f"alone{start}") for ids in PROMPTS)
            )
            asking = [asyncio.create_task(ours.generate(ids)) for ids in PROMPTS]
            await ours.until_generated(200)
            await update(ours, models[1])
            assert ours.version == start + 1
            for url in urls:
                label = await ours.get("/weight_info", url)
                assert label == {"weight_version": str(start + 1)}
            changed = []
            for number, answer in enumerate(await asyncio.gather(*asking)):
                assert segments(answer) == spans(answer)
                made = answer["choices"][0]["token_ids"]
                assert len(made) == TOKENS
                (_, _, cut), *rest = segments(answer)
                before = alone[number]["choices"][0]["token_ids"]
                assert made[:cut] == before[:cut]
                if rest:
                    changed.append(number)
                    salt = f"after{start}{number}"
                    context = PROMPTS[number] + made[:cut]
                    fresh = await ours.generate(context, TOKENS - cut, urls[0], salt)
                    assert made[cut:] == fresh["choices"][0]["token_ids"]
            assert changed
            late = await ours.generate(PROMPTS[0])
            assert segments(late) == spans(late) == [(str(start + 1), 0, TOKENS)]
            await update(ours, models[0])
            assert ours.version == start + 2
            again = await ours.generate(PROMPTS[0])
            assert again["choices"][0]["token_ids"] == alone[0]["choices"][0]["token_ids"]
            assert segments(again) == spans(again) == [(str(start + 2), 0, TOKENS)]

    asyncio.run(asyncio.wait_for(scene(), LIMIT_S))
