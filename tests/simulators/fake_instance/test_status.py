"""What a server tells of itself."""

from __future__ import annotations

from tests.simulators.fake_instance.served import SPEC, play, served


def test_what_a_server_tells_of_itself() -> None:
    async def scene() -> None:
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

    play(scene)


def test_a_label_set_from_outside_and_a_server_that_lies_of_it() -> None:
    async def scene() -> None:
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

    play(scene)


def test_one_that_has_ended_does_not_say_whether_it_is_paused() -> None:
    async def scene() -> None:
        async with served() as client:
            await client.post(
                "/collective_rpc",
                {"method": "reload_weights", "kwargs": {"weights_path": "/nowhere"}},
            )
            await client.post("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}})
            assert (await client.get("/health"))[0] == 503
            assert (await client.get("/is_paused"))[0] == 500

    play(scene)
