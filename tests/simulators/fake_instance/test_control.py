"""Pause, resume, abort, and the prefix cache."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from rollout_sched.live.ports import Gauges
from rollout_sched.simulators.fake_instance.control import render
from rollout_sched.simulators.fake_instance.engine import Engine, EngineSettings
from tests.simulators.fake_instance.served import FOREVER, PROMPT, SPEC, Client, begin, served


async def uninterrupted(client: Client) -> Any:
    return await client.generate(PROMPT, sampling={**FOREVER, "max_tokens": 60}, cache_salt="own")


async def test_an_abort_returns_the_partial_tokens() -> None:
    async with served(speed=200.0) as client:
        task = await begin(client, request_id="mine")
        for unknown in ("mine", "generate-tokens-other"):
            _, told = await client.post("/abort_requests", {"request_ids": [unknown]})
            assert told == {"status": "aborted", "aborted": 1}
        assert not task.done()
        path = "/inference/v1/abort_requests"
        assert await client.post(path, {"request_ids": ["generate-tokens-mine"]}) == (200, b"")
        part = await task
        assert part["finish_reason"] == "abort"
        made = len(part["token_ids"])
        assert part["weight_versions"] == [{"version": "default", "start": 0, "end": made}]
        sampling = {**FOREVER, "max_tokens": 60 - made}
        rest = await client.generate([*PROMPT, *part["token_ids"]], sampling=sampling)
        whole = await uninterrupted(client)
        assert part["token_ids"] + rest["token_ids"] == whole["token_ids"]
        assert await client.metric("vllm:request_success_total", "abort") == 0


async def test_abort_all_and_streams_that_are_aborted() -> None:
    async with served(speed=200.0) as client:
        body = {"token_ids": PROMPT, "sampling_params": {**FOREVER, "stream_interval": 16}}
        task = asyncio.create_task(client.stream("/inference/v1/generate", body))
        await client.until_generated(20)
        assert (await client.post("/abort_requests", {}))[1] == {"status": "aborted", "aborted": 1}
        choices = [chunk["choices"][0] for chunk in await task]
        sizes = [len(choice["token_ids"]) for choice in choices]
        assert sizes[:2] == [1, 16]
        assert choices[-1]["finish_reason"] == "abort"
        assert choices[-1]["weight_versions"][0]["end"] == sum(sizes)


@pytest.mark.parametrize("clear_cache", [False, True])
async def test_pause_keep_freezes_requests_and_gauges(clear_cache: bool) -> None:
    async with served(speed=200.0) as client:
        task = await begin(client)
        path = f"/pause?mode=keep&clear_cache={str(clear_cache).lower()}"
        assert await client.post(path) == (200, {"status": "paused"})
        assert (await client.get("/is_paused"))[1] == {"is_paused": True}
        assert (await client.get("/health"))[0] == 200
        queued = asyncio.create_task(client.generate([9], sampling={"max_tokens": 1}))
        while (await client.get("/load"))[1] != {"server_load": 2}:
            await asyncio.sleep(0.002)
        assert await client.metric("vllm:num_requests_running") == 1
        assert await client.metric("vllm:num_requests_waiting") == 0
        await client.post("/update_weight_version", {"new_version": "7"})
        assert await client.post("/resume") == (200, {"status": "resumed"})
        choice = await task
        first, second = choice["weight_versions"]
        assert (first["version"], first["start"]) == ("default", 0)
        assert second == {"version": "7", "start": first["end"], "end": 60}
        await queued
        assert choice["token_ids"] == (await uninterrupted(client))["token_ids"]
        assert await client.metric("vllm:num_preemptions_total") == clear_cache


@pytest.mark.parametrize(("clear_cache", "cached"), [(False, True), (True, False)])
async def test_pause_abort_returns_everything(clear_cache: bool, cached: bool) -> None:
    async with served(speed=200.0) as client:
        task = await begin(client, 20)
        await client.post(f"/pause?mode=abort&clear_cache={int(clear_cache)}")
        part = await task
        assert part["finish_reason"] == "abort"
        await client.post("/resume")
        before = await client.metric("vllm:prefix_cache_hits_total")
        await client.generate([*PROMPT, *part["token_ids"]], sampling={"max_tokens": 1})
        hits = await client.metric("vllm:prefix_cache_hits_total") - before
        assert (hits >= 20) == cached


async def test_pause_wait_lets_requests_finish() -> None:
    async with served(speed=500.0) as client:
        task = await begin(client)
        await client.post("/pause?mode=wait")
        assert task.done() or (await task)["finish_reason"] == "length"
        assert (await client.get("/is_paused"))[1] == {"is_paused": True}


async def test_a_salt_is_a_prefix_cache_of_its_own() -> None:
    async with served() as client:
        hits = []
        for salt in ("a", "a", "b"):
            await client.generate(PROMPT, sampling={"max_tokens": 1}, cache_salt=salt)
            hits.append(await client.metric("vllm:prompt_tokens_cached_total"))
        assert hits == [0, 4, 4]
        assert (await client.post("/reset_prefix_cache"))[1] == {"success": True}
        await client.generate(PROMPT, sampling={"max_tokens": 1}, cache_salt="a")
        assert await client.metric("vllm:prompt_tokens_cached_total") == 4


async def test_the_cache_cannot_be_reset_while_blocks_are_held() -> None:
    async with served(speed=100.0) as client:
        task = await begin(client)
        assert (await client.post("/reset_prefix_cache"))[1] == {"success": False}
        path = "/reset_prefix_cache?reset_running_requests=true"
        assert (await client.post(path))[1] == {"success": True}
        assert len((await task)["token_ids"]) == 60
        assert await client.metric("vllm:num_preemptions_total") == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause?mode=sleep", None),
        ("/pause?clear_cache=perhaps", None),
        ("/abort_requests", {"request_ids": "x"}),
        ("/inference/v1/abort_requests", {}),
    ],
)
async def test_bad_orders(path: str, body: Any) -> None:
    async with served() as client:
        status, answer = await client.post(path, body)
        assert status == 400
        assert answer["error"]["message"]


async def test_a_sleeping_server_resumes_when_fully_awake() -> None:
    async with served() as client:
        asleep = await client.post("/sleep?level=2&mode=keep")
        assert asleep == (200, {"status": "sleeping", "level": 2})
        task = asyncio.create_task(client.generate(PROMPT, sampling={"max_tokens": 1}))
        for tag, status in (("weights", "sleeping"), ("kv_cache", "awake")):
            assert (await client.get("/is_sleeping"))[1] == {"is_sleeping": True}
            told = await client.post(f"/wake_up?tags={tag}")
            assert told == (200, {"status": status, "tags": [tag]})
        assert (await client.get("/is_sleeping"))[1] == {"is_sleeping": False}
        await task
        await client.post("/sleep")
        assert (await client.post("/wake_up"))[1] == {"status": "awake", "tags": None}
        assert (await client.post("/sleep?mode=deep"))[0] == 400


async def test_a_server_describes_itself() -> None:
    async with served(model="m", world_size=4) as client:
        assert await client.get("/health") == (200, b"")
        assert (await client.get("/version"))[1] == {"version": "0.32.0"}
        (model,) = (await client.get("/v1/models"))[1]["data"]
        assert (model["id"], model["max_model_len"]) == ("m", SPEC.max_model_len)
        _, info = await client.get("/server_info?config_format=json")
        scheduler = info["vllm_config"]["scheduler_config"]
        assert scheduler["max_num_seqs"] == SPEC.max_num_seqs
        assert info["vllm_config"]["model_config"]["dtype"] == "torch.bfloat16"
        assert info["vllm_config"]["model_config"]["logprobs_mode"] == "processed_logprobs"
        assert info["vllm_config"]["weight_transfer_config"] == {"backend": "nccl"}
        assert (await client.get("/liveness"))[0] == 200
        assert (await client.get("/get_world_size"))[1] == {"world_size": 4}
        assert isinstance((await client.get("/server_info"))[1]["vllm_config"], str)
        assert (await client.get("/weight_info"))[1] == {"weight_version": "default"}
        for path in ("/pause", "/abort_requests", "/collective_rpc", "/update_weight_version"):
            assert (await client.get(path))[0] == 405


async def test_a_label_is_set_and_may_be_misreported() -> None:
    async with served(weight_version="4") as client:
        assert (await client.get("/weight_info"))[1] == {"weight_version": "4"}
        made = await client.generate([1, 2, 3], sampling={"max_tokens": 2})
        assert made["weight_versions"] == [{"version": "4", "start": 0, "end": 2}]
        await client.post("/fake/weights", {"weight_version": "5"})
        assert (await client.get("/weight_info"))[1] == {"weight_version": "5"}
        await client.post("/fake/weights", {"says": "9"})
        assert (await client.get("/weight_info"))[1] == {"weight_version": "9"}
        made = await client.generate([1, 2, 3], sampling={"max_tokens": 2})
        assert made["weight_versions"][0]["version"] == "5"
        await client.post("/fake/weights", {"says": None})
        assert (await client.get("/weight_info"))[0] == 404


async def test_an_ended_server_reports_no_pause_state() -> None:
    async with served() as client:
        await client.post(
            "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/nowhere"}}
        )
        await client.post("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}})
        assert (await client.get("/health"))[0] == 503
        assert (await client.get("/is_paused"))[0] == 500


SAMPLE = re.compile(r'([a-z_:]+)(?:\{((?:[a-z_]+="[^"]*",?)*)\})? ([0-9.e+]+)')


async def test_every_gauge_is_exposed() -> None:
    engine = Engine(EngineSettings(SPEC, model="m"))
    lines = render(engine, Gauges(1, 2, 0.5, 3, 40, 60, 0, 70)).splitlines()
    types = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}
    values = {}
    for line in lines:
        if not line.startswith("#"):
            match = SAMPLE.fullmatch(line)
            assert match, line
            name, labels, value = match.groups()
            assert types[name] == ("counter" if name.endswith("_total") else "gauge")
            assert name.startswith("process") or 'engine="0",model_name="m"' in labels
            values[name] = values.get(name, 0.0) + float(value)
    assert values["vllm:num_requests_running"] == 1
    assert values["vllm:num_requests_waiting"] == 2
    assert values["vllm:kv_cache_usage_perc"] == 0.5
    assert values["vllm:num_preemptions_total"] == 3
    assert values["vllm:prompt_tokens_by_source_total"] == 100
    assert values["vllm:prefix_cache_hits_total"] == 60
    assert values["vllm:generation_tokens_total"] == 70
    (config,) = [line for line in lines if line.startswith("vllm:cache_config_info")]
    for told in ('block_size="4"', 'num_gpu_blocks="1001"', 'kv_cache_size_tokens="4000"'):
        assert told in config


LOAD = {"lora_name": "mine", "lora_path": "/adapters/1"}


@pytest.mark.parametrize(
    "path", ["/v1/load_lora_adapter", "/skyrl/v1/load_lora_adapter", "/load_lora_adapter"]
)
async def test_a_loaded_adapter_is_a_model_that_can_be_asked(path: str) -> None:
    async with served(model="base") as client:
        asked = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}, "model": "mine"}
        assert (await client.post("/inference/v1/generate", asked))[0] == 404
        assert (await client.post(path, LOAD))[0] == 200
        assert (await client.post("/inference/v1/generate", asked))[0] == 200
        _, models = await client.get("/v1/models")
        assert [(one["id"], one["parent"]) for one in models["data"]] == [
            ("base", None),
            ("mine", "base"),
        ]
        assert (await client.post("/v1/unload_lora_adapter", {"lora_name": "mine"}))[0] == 200
        assert (await client.post("/inference/v1/generate", asked))[0] == 404
        assert (await client.post("/v1/unload_lora_adapter", {"lora_name": "mine"}))[0] == 404


async def test_vllm_refuses_a_name_that_is_taken_and_the_others_replace_it() -> None:
    async with served() as client:
        assert (await client.post("/v1/load_lora_adapter", LOAD))[0] == 200
        assert (await client.post("/v1/load_lora_adapter", LOAD))[0] == 400
        in_place = {**LOAD, "load_inplace": True}
        assert (await client.post("/v1/load_lora_adapter", in_place))[0] == 200
        assert (await client.post("/load_lora_adapter", LOAD)) == (200, {"status": "ok"})
        _, told = await client.post("/skyrl/v1/load_lora_adapter", LOAD)
        assert told == {"status": "ok", "lora_name": "mine", "lora_int_id": 1}
        assert (await client.post("/load_lora_adapter", {}))[0] == 400


# ------------------------------------------------------------------------------------------
# Text to tokens and back, over HTTP.


async def test_tokens_and_text() -> None:
    async with served() as client:
        _, told = await client.post("/tokenize", {"prompt": "w5 w623"})
        assert told["tokens"] == [5, 623]
        assert (told["count"], told["max_model_len"]) == (2, SPEC.max_model_len)
        assert (await client.post("/detokenize", {"tokens": [5, 623]}))[1] == {"prompt": "w5 w623 "}
        assert (await client.post("/tokenize", {}))[0] == 400
        assert (await client.post("/detokenize", {"tokens": ["x"]}))[0] == 400


async def test_a_chat_is_rendered_as_it_would_be_asked() -> None:
    async with served(model="m") as client:
        messages = [{"role": "user", "content": "one two"}]
        status, told = await client.post("/v1/chat/completions/render", {"messages": messages})
        _, tokens = await client.post("/tokenize", {"messages": messages})
        assert (status, told["model"], told["token_ids"]) == (200, "m", tokens["tokens"])
