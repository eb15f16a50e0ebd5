"""SkyRL's own clients for data and for control; the gateway is their proxy and their one server."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import pytest
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
    PauseMode,
    RemoteInferenceClient,
)
from skyrl.backends.skyrl_train.weight_sync.control_plane import (
    SkyrlWeightSyncClient,
    nccl_init_payloads,
)

from rollout_sched import simulators
from tests.neighbours.fleet import Fleet, fleet

SCENARIO = Path(simulators.__file__).parent / "replay" / "scenarios" / "qwen7b-8xh100.toml"
#: Workers of each simulated server.
WORKERS = 2
SAMPLING = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True, "logprobs": 1}

pytestmark = pytest.mark.real_time(120)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Servers that draft tokens: SkyRL updates their drafter too."""
    drafting = tmp_path_factory.mktemp("scenario") / "drafting.toml"
    drafts = "\n[speculation]\ntokens = 3\nacceptance = 0.5\n"
    drafting.write_text(SCENARIO.read_text() + drafts)
    fake = ["--speed", "50", "--median-tokens", "20", "--tensor-parallel-size", str(WORKERS)]
    fake += ["--scenario", str(drafting)]
    with fleet(2, policy="dplb", fake=fake) as running:
        yield running


@asynccontextmanager
async def connected(ours: Fleet, **settings: Any) -> AsyncIterator[RemoteInferenceClient]:
    """A client that knows one server."""
    client = RemoteInferenceClient(ours.url, [ours.url], 1, ours.model, **settings)
    client = pickle.loads(pickle.dumps(client))  # as Ray's workers get it
    try:
        yield client
    finally:
        await client.teardown()
        await client.aclose()


@pytest.fixture
@asynccontextmanager
async def client(ours: Fleet) -> AsyncIterator[RemoteInferenceClient]:
    async with connected(ours) as made:
        yield made


def version(ours: Fleet) -> int:
    return int(ours.gateway.get("/admin/state")["version"])


async def test_generate(client: RemoteInferenceClient) -> None:
    batch = {
        "prompt_token_ids": [[1, 2, 3], [4, 5]],
        "sampling_params": SAMPLING,
        "session_ids": ["a", "b"],
        "cache_salt": "v1",
    }
    made = await client.generate(batch)
    assert made["stop_reasons"] == ["length", "length"]
    assert [len(ids) for ids in made["response_ids"]] == [20, 20]
    assert [len(told) for told in made["response_logprobs"]] == [20, 20]
    assert all(made["responses"])


async def test_generate_with_the_experts_of_a_mixture(ours: Fleet) -> None:
    async with connected(ours, enable_return_routed_experts=True) as client:
        made = await client.generate({"prompt_token_ids": [[1]], "sampling_params": SAMPLING})
    assert [experts.shape for experts in made["rollout_expert_indices"]] == [(20, 1, 1)]


async def test_sample(client: RemoteInferenceClient) -> None:
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "num_samples": 2,
        "sampling_params": {"max_tokens": 7, "temperature": 1.0, "seed": 1},
        "session_id": "s",
    }
    told = await client.sample({"json": body})
    assert told["type"] == "sample"
    assert all(len(one["tokens"]) == len(one["logprobs"]) <= 7 for one in told["sequences"])
    assert len(told["sequences"]) == 2


async def test_openai_s_endpoints(client: RemoteInferenceClient) -> None:
    messages = [{"role": "user", "content": "one two"}]
    chat = {"messages": messages, "max_tokens": 3, "session_id": "s"}
    chat, completion, rendered = [
        await client.chat_completion({"json": dict(chat)}),
        await client.completion({"json": {"prompt": "one two", "max_tokens": 3}}),
        await client.render_chat_completion({"json": {"messages": messages}}),
    ]
    assert chat["choices"][0]["message"]["content"]
    assert completion["choices"][0]["text"]
    assert rendered["token_ids"]


async def test_tokens(client: RemoteInferenceClient) -> None:
    assert await client.detokenize(await client.tokenize(["w7 w8 ", "w9 "])) == ["w7 w8 ", "w9 "]


async def test_sessions_are_finished(client: RemoteInferenceClient, ours: Fleet) -> None:
    before = ours.gateway.metric("rollout_sched_sessions")
    batch = {"prompt_token_ids": [[1]], "sampling_params": SAMPLING, "session_ids": ["own"]}
    await client.generate(batch)
    await client.finish_session("own")
    await client.finish_session("nobody's")
    assert ours.gateway.metric("rollout_sched_sessions") == before


@pytest.mark.parametrize("mode", [*PauseMode, "keep"])
async def test_pauses_reach_every_server(
    client: RemoteInferenceClient, ours: Fleet, mode: Any
) -> None:
    def paused() -> list[bool]:
        return [server.get("/is_paused")["is_paused"] for server in ours.instances]

    await client.pause(mode)
    assert paused() == [True, True]
    await client.resume()
    assert paused() == [False, False]
    await client.pause_generation()
    await client.reset_prefix_cache(reset_running_requests=True)
    await client.resume_generation()
    assert paused() == [False, False]


async def test_sleep(client: RemoteInferenceClient, ours: Fleet) -> None:
    await client.sleep(level=1)
    assert ours.gateway.get("/is_sleeping")["is_sleeping"]
    await client.wake_up(tags=["weights"])
    assert ours.gateway.get("/is_sleeping")["is_sleeping"]
    await client.wake_up(tags=["kv_cache"])
    await client.generate({"prompt_token_ids": [[1]], "sampling_params": SAMPLING})


async def test_weights_in_the_middle_of_answers(client: RemoteInferenceClient, ours: Fleet) -> None:
    """Ranks meet, or this hangs; every answer says which weights made it."""
    begun = version(ours)
    assert await client.get_world_size() == (2 * WORKERS, 2 * WORKERS)
    sync = SkyrlWeightSyncClient([ours.url], init_payload_fn=nccl_init_payloads)
    info = {"master_address": uuid4().hex, "master_port": 1}
    info |= {"rank_offset": 1, "world_size": 2 * WORKERS + 1}
    await asyncio.to_thread(sync.init_weight_transfer_engine, info)
    sampling = {**SAMPLING, "max_tokens": 1500}
    prompts = [[n + 1] for n in range(4)]
    body = {"prompt_token_ids": prompts, "sampling_params": sampling}
    asking = asyncio.create_task(client.generate(body))
    while ours.gateway.get("/admin/state")["requests"]["in_flight"] < len(prompts):
        await asyncio.sleep(0.02)

    def send() -> None:
        sync.start_weight_update()
        sync.update_weights({"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[1]]})
        sync.finish_weight_update()

    def send_draft() -> None:
        with sync.draft_session():
            send()

    for number in range(2):
        before = version(ours)
        await client.fetch_weights(number, "/sync", "/published")
        await client.pause_generation()
        await asyncio.to_thread(send)
        await asyncio.to_thread(send_draft)
        client.increment_weight_version()
        await client.resume_generation()
        assert version(ours) == before + 1
    await asyncio.to_thread(sync.close)
    made = await asking
    assert [len(ids) for ids in made["response_ids"]] == [1500] * len(prompts)
    assert client.weight_version == 2
    for server in ours.instances:
        assert server.get("/weight_info") == {"weight_version": str(begun + 2)}


async def test_vllm_s_own_update_in_one_call(client: RemoteInferenceClient) -> None:
    """Which vLLM refuses before it has begun: so does the fleet, and the client is told."""
    with pytest.raises(aiohttp.ClientResponseError, match="failed on"):
        await client.update_named_weights({"names": []})
    # Nobody knows what is left of the weights, so a whole update has to come.
    await client.load_lora_adapter("repair", "/adapters/repair")
    await client.generate({"prompt_token_ids": [[1]], "sampling_params": SAMPLING})


async def test_adapters(ours: Fleet) -> None:
    async with connected(ours, uses_lora_weight_sync=True) as client:
        for number in range(2):  # the second replaces the first
            before = version(ours)
            await client.load_lora_adapter("mine", f"/adapters/{number}")
            assert version(ours) == before + 1
        body = {"prompt_token_ids": [[1]], "sampling_params": SAMPLING}
        await client.generate(body, model="mine")
        await client.unload_lora_adapter("mine")
        with pytest.raises(aiohttp.ClientResponseError, match="does not exist"):
            await client.generate(body, model="mine")
