"""prime-rl's and AReaL's own paths."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from rollout_sched.integrations.vllm import metrics_text
from rollout_sched.simulators.instance.model import Speculation
from tests.simulators.fake_instance.served import PROMPT, SPEC, Client, begin, served

META = {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[1]], "group_name": "g"}


def group(**fields: Any) -> dict[str, Any]:
    told = {"master_address": uuid4().hex, "master_port": "1", "backend": "nccl"}
    return {**told, "group_name": "g", "rank_offset": 1, "world_size": 2, **fields}


async def test_prime_s_broadcaster_counts_no_trainer_and_then_weights_come_without_a_folder() -> (
    None
):
    async with served(world_size=2) as client:
        assert (await client.post("/update_weights", {"weight_dir": None}))[0] == 500
        told = {"host": uuid4().hex, "port": 1, "rank_offset": 0, "inference_world_size": 2}
        assert await client.post("/init_broadcaster", told) == (200, {"status": "ok"})
        update = await client.post("/update_weights", {"weight_dir": None})
        assert update == (200, {"status": "ok"})
        assert (await client.post("/init_broadcaster", {"host": "h", "port": 1}))[0] == 200
        told["inference_world_size"] = 1
        assert (await client.post("/init_broadcaster", told))[0] == 500


async def test_prime_s_weights_from_a_folder(tmp_path: Path) -> None:
    async with served() as client:
        update = await client.post("/update_weights", {"weight_dir": str(tmp_path)})
        assert update == (200, {"status": "ok"})
        gone = {"weight_dir": str(tmp_path / "gone")}
        assert (await client.post("/update_weights", gone))[0] == 500
        assert (await client.post("/update_weights", {}))[0] == 400


async def test_areal_s_updates_abort_what_runs_and_resume_by_themselves(tmp_path: Path) -> None:
    async with served() as client:
        task = await begin(client)
        body = {"model_path": str(tmp_path)}
        status, told = await client.post("/areal_update_weights", body)
        assert (status, told["success"]) == (200, True)
        assert (await task)["finish_reason"] == "abort"
        assert (await client.get("/is_paused"))[1] == {"is_paused": False}
        await client.generate(PROMPT, sampling={"max_tokens": 1})


async def test_areal_s_failures_are_told_with_400(tmp_path: Path) -> None:
    async with served() as client:
        body = {"model_path": str(tmp_path / "gone")}
        status, told = await client.post("/areal_update_weights", body)
        assert (status, told["success"]) == (400, False)
        assert "no weights at" in told["message"]
        assert (await client.post("/areal_update_weights_xccl", {}))[0] == 400


async def test_areal_s_transfer() -> None:
    async with served() as client:
        assert (await client.post("/areal_pause_generation", {}))[0] == 200
        assert (await client.get("/is_paused"))[1] == {"is_paused": True}
        assert (await client.post("/areal_init_weights_update_group", group()))[0] == 200
        assert (await client.post("/areal_set_update_weight_meta", META))[0] == 200
        assert (await client.post("/areal_set_update_weight_meta", {}))[0] == 400
        assert (await client.post("/areal_update_weights_xccl", {}))[0] == 200
        assert (await client.post("/areal_continue_generation", {}))[0] == 200
        assert (await client.get("/is_paused"))[1] == {"is_paused": False}


@pytest.mark.parametrize(("offset", "met"), [(1, False), (2, True)])
async def test_areal_s_groups_are_checked_for_their_ranks(offset: int, met: bool) -> None:
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


async def test_weights_from_disk(tmp_path: Path) -> None:
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


async def test_weights_by_transfer() -> None:
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


async def test_a_drafter_fits_the_weights_for_which_it_was_loaded() -> None:
    """Of one draft a step, all are accepted, then those of the update are not, then all again:
    also if the trainer labels the weights after the drafter's update."""

    async def accepted(client: Client, label: str, *updates: str) -> tuple[int, int]:
        for update in updates:
            assert (await client.post(f"/start_{update}"))[0] == 200
            assert (await client.post("/update_weights", {"update_info": {}}))[0] == 200
            assert (await client.post("/finish_weight_update"))[0] == 200
        await client.post("/update_weight_version", {"new_version": label})
        before = await drafts(client)
        await client.generate(PROMPT, sampling={"max_tokens": 101})
        after = await drafts(client)
        return after[0] - before[0], after[1] - before[1]

    speculation = Speculation(1, 1.0, schedule="always", acceptance_lost_per_version=1.0)
    spec = msgspec.structs.replace(SPEC, speculation=speculation)
    async with served(spec=spec) as client:
        await client.post("/init_weight_transfer_engine", {"init_info": {}})
        assert await accepted(client, "0") == (50, 50)
        assert await accepted(client, "1", "weight_update") == (100, 0)
        assert await accepted(client, "1", "draft_weight_update") == (50, 50)
        assert await accepted(client, "2", "weight_update", "draft_weight_update") == (50, 50)
        assert await accepted(client, "3", "weight_update") == (100, 0)


async def drafts(client: Client) -> tuple[int, int]:
    """Drafted and accepted tokens."""
    async with client.session.get("/metrics") as answer:
        found = metrics_text.gauges(await answer.read())
    return found.drafted_tokens, found.accepted_tokens


async def test_an_unfinished_transfer_is_the_end() -> None:
    async with served(speed=100.0) as client:
        task = await begin(client)
        await client.post("/pause?mode=keep&clear_cache=false")
        await client.post("/init_weight_transfer_engine", {"init_info": {}})
        await client.post("/start_weight_update")
        assert (await client.post("/resume"))[0] == 200
        with pytest.raises(AssertionError, match="EngineCore"):
            await task
        assert (await client.get("/health"))[0] == 503


def ranks(master: str, offset: int, world: int) -> dict[str, Any]:
    told = {"master_address": master, "master_port": 1, "packed": True}
    return {"init_info": {**told, "rank_offset": offset, "world_size": world}}


@pytest.mark.parametrize(("offsets", "met"), [((1, 3), True), ((1, 1), False), ((3, 3), False)])
async def test_the_ranks_of_a_group_are_checked_as_nccl_does(
    offsets: tuple[int, int], met: bool
) -> None:
    """Two of the same rank hang, and so does who waits for one that is missing."""
    path = "/init_weight_transfer_engine"
    master = uuid4().hex
    async with served(world_size=2) as one, served(world_size=1) as two:
        calls = [
            asyncio.create_task(client.post(path, ranks(master, offset, 4)))
            for client, offset in zip((one, two), offsets, strict=True)
        ]
        done, waiting = await asyncio.wait(calls, timeout=20 if met else 0.5)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        # The one of two workers that begins at rank 3 is told at once that there is no 4.
        assert [task.result()[0] for task in done] == ([200, 200] if met else [500] * len(done))
        assert (await one.post(path, ranks(master, 3, 4)))[0] == 500
        assert (await one.post(path, {"init_info": {"rank_offset": 1}}))[0] == 400


async def test_skyrl_s_worker_methods() -> None:
    async with served(world_size=2) as client:
        rpc = {"method": "update_weights_nccl", "kwargs": {"update_info": {}}}
        assert (await client.post("/collective_rpc", rpc))[0] == 500
        await client.post("/init_weight_transfer_engine", {"init_info": {}})
        for method in (
            "skyrl_start_weight_update",
            "update_weights_nccl",
            "skyrl_finish_weight_update",
        ):
            status, told = await client.post("/collective_rpc", {"method": method})
            assert (status, told) == (200, {"results": [None, None]})


@pytest.mark.parametrize(
    ("path", "body"),
    [("/update_weight_version", {}), ("/collective_rpc", {}), ("/update_weights", {})],
)
async def test_bad_orders(path: str, body: Any) -> None:
    async with served() as client:
        assert (await client.post(path, body))[0] == 400
