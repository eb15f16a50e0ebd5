"""LoRA adapters, by each of the three paths that load them."""

from __future__ import annotations

import pytest

from tests.simulators.fake_instance.served import PROMPT, play, served

LOAD = {"lora_name": "mine", "lora_path": "/adapters/1"}


@pytest.mark.parametrize(
    "path", ["/v1/load_lora_adapter", "/skyrl/v1/load_lora_adapter", "/load_lora_adapter"]
)
def test_a_loaded_adapter_is_a_model_that_can_be_asked(path: str) -> None:
    async def scene() -> None:
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

    play(scene)


def test_vllm_refuses_a_name_that_is_taken_and_the_others_replace_it() -> None:
    async def scene() -> None:
        async with served() as client:
            assert (await client.post("/v1/load_lora_adapter", LOAD))[0] == 200
            assert (await client.post("/v1/load_lora_adapter", LOAD))[0] == 400
            in_place = {**LOAD, "load_inplace": True}
            assert (await client.post("/v1/load_lora_adapter", in_place))[0] == 200
            assert (await client.post("/load_lora_adapter", LOAD)) == (200, {"status": "ok"})
            _, told = await client.post("/skyrl/v1/load_lora_adapter", LOAD)
            assert told == {"status": "ok", "lora_name": "mine", "lora_int_id": 1}
            assert (await client.post("/load_lora_adapter", {}))[0] == 400

    play(scene)
