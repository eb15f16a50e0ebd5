"""Weights from disk and by transfer, over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.simulators.fake_instance.served import PROMPT, begin, play, served


def test_weights_from_disk(tmp_path: Path) -> None:
    async def scene() -> None:
        async with served() as client:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
            assert await client.post("/collective_rpc", body) == (200, {"results": [None]})
            assert (await client.post("/collective_rpc", {"method": "dance"}))[0] == 500
            await client.generate(PROMPT, sampling={"max_tokens": 1})
            body["kwargs"] = {"weights_path": str(tmp_path / "gone")}
            assert (await client.post("/collective_rpc", body))[0] == 500
            assert (await client.get("/health"))[0] == 200
            generate = {"token_ids": PROMPT, "sampling_params": {}}
            status, answer = await client.post("/inference/v1/generate", generate)
            assert (status, answer["error"]["code"]) == (500, 500)
            assert "EngineCore" in answer["error"]["message"]
            assert (await client.get("/health"))[0] == 503
            assert (await client.get("/metrics"))[0] == 503
            assert (await client.post("/pause"))[0] == 500
            assert (await client.post("/abort_requests", {}))[0] == 200

    play(scene)


def test_weights_by_transfer() -> None:
    async def scene() -> None:
        async with served() as client:
            assert (await client.post("/start_weight_update"))[0] == 500
            assert (await client.post("/init_weight_transfer_engine", {}))[0] == 400
            await client.post("/init_weight_transfer_engine", {"init_info": {}})
            assert (await client.post("/update_weights", {"update_info": {}}))[0] == 500
            assert (await client.post("/finish_weight_update"))[0] == 500
            await client.post("/pause?mode=keep&clear_cache=false")
            task = asyncio.create_task(client.generate(PROMPT, sampling={"max_tokens": 2}))
            assert (await client.post("/start_weight_update"))[0] == 200
            assert (await client.post("/start_weight_update"))[0] == 500
            assert (await client.post("/update_weights", {"update_info": {"path": "x"}}))[0] == 200
            finish = {"weight_version": "17"}
            assert (await client.post("/finish_weight_update", finish))[0] == 200
            assert (await client.get("/weight_info"))[1] == {"weight_version": "17"}
            await client.post("/resume")
            assert (await task)["weight_versions"] == [{"version": "17", "start": 0, "end": 2}]

    play(scene)


def test_an_unfinished_transfer_is_the_end() -> None:
    async def scene() -> None:
        async with served(speed=100.0) as client:
            task = await begin(client)
            await client.post("/pause?mode=keep&clear_cache=false")
            await client.post("/init_weight_transfer_engine", {"init_info": {}})
            await client.post("/start_weight_update")
            assert (await client.post("/resume"))[0] == 200
            with pytest.raises(AssertionError, match="EngineCore"):
                await task
            assert (await client.get("/health"))[0] == 503

    play(scene)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/update_weight_version", {}), ("/collective_rpc", {}), ("/update_weights", {})],
)
def test_bad_orders(path: str, body: Any) -> None:
    async def scene() -> None:
        async with served() as client:
            assert (await client.post(path, body))[0] == 400

    play(scene)
