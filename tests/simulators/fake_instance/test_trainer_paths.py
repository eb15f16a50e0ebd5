"""prime-rl's and AReaL's own paths."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.simulators.fake_instance.served import PROMPT, begin, play, served

META = {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[1]], "group_name": "g"}


def group(**fields: Any) -> dict[str, Any]:
    told = {"master_address": uuid4().hex, "master_port": "1", "backend": "nccl"}
    return {**told, "group_name": "g", "rank_offset": 1, "world_size": 2, **fields}


def test_prime_s_broadcaster_counts_no_trainer_and_then_weights_come_without_a_folder() -> None:
    async def scene() -> None:
        async with served(world_size=2) as client:
            assert (await client.post("/update_weights", {"weight_dir": None}))[0] == 500
            told = {"host": uuid4().hex, "port": 1, "rank_offset": 0, "inference_world_size": 2}
            assert await client.post("/init_broadcaster", told) == (200, {"status": "ok"})
            update = await client.post("/update_weights", {"weight_dir": None})
            assert update == (200, {"status": "ok"})
            assert (await client.post("/init_broadcaster", {"host": "h", "port": 1}))[0] == 200
            told["inference_world_size"] = 1
            assert (await client.post("/init_broadcaster", told))[0] == 500

    play(scene)


def test_prime_s_weights_from_a_folder(tmp_path: Path) -> None:
    async def scene() -> None:
        async with served() as client:
            update = await client.post("/update_weights", {"weight_dir": str(tmp_path)})
            assert update == (200, {"status": "ok"})
            gone = {"weight_dir": str(tmp_path / "gone")}
            assert (await client.post("/update_weights", gone))[0] == 500
            assert (await client.post("/update_weights", {}))[0] == 400

    play(scene)


def test_areal_s_updates_abort_what_runs_and_resume_by_themselves(tmp_path: Path) -> None:
    async def scene() -> None:
        async with served() as client:
            task = await begin(client)
            body = {"model_path": str(tmp_path)}
            status, told = await client.post("/areal_update_weights", body)
            assert (status, told["success"]) == (200, True)
            assert (await task)["finish_reason"] == "abort"
            assert (await client.get("/is_paused"))[1] == {"is_paused": False}
            await client.generate(PROMPT, sampling={"max_tokens": 1})

    play(scene)


def test_areal_s_failures_are_told_with_400(tmp_path: Path) -> None:
    async def scene() -> None:
        async with served() as client:
            body = {"model_path": str(tmp_path / "gone")}
            status, told = await client.post("/areal_update_weights", body)
            assert (status, told["success"]) == (400, False)
            assert "no weights at" in told["message"]
            assert (await client.post("/areal_update_weights_xccl", {}))[0] == 400

    play(scene)


def test_areal_s_transfer() -> None:
    async def scene() -> None:
        async with served() as client:
            assert (await client.post("/areal_pause_generation", {}))[0] == 200
            assert (await client.get("/is_paused"))[1] == {"is_paused": True}
            assert (await client.post("/areal_init_weights_update_group", group()))[0] == 200
            assert (await client.post("/areal_set_update_weight_meta", META))[0] == 200
            assert (await client.post("/areal_set_update_weight_meta", {}))[0] == 400
            assert (await client.post("/areal_update_weights_xccl", {}))[0] == 200
            assert (await client.post("/areal_continue_generation", {}))[0] == 200
            assert (await client.get("/is_paused"))[1] == {"is_paused": False}

    play(scene)


@pytest.mark.parametrize(("offset", "met"), [(1, False), (2, True)])
def test_areal_s_groups_are_checked_for_their_ranks(offset: int, met: bool) -> None:
    async def scene() -> None:
        async with served() as one, served() as two:
            told = group(world_size=3)
            calls = [
                asyncio.create_task(client.post("/areal_init_weights_update_group", body))
                for client, body in ((one, told), (two, {**told, "rank_offset": offset}))
            ]
            done, waiting = await asyncio.wait(calls, timeout=20 if met else 0.5)
            assert len(done) == (2 if met else 0)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    play(scene)
