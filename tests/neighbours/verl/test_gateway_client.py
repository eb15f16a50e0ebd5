"""verl's client of LLM servers, before a gateway."""

from __future__ import annotations

import asyncio
import pickle

import pytest
from omegaconf import OmegaConf, open_dict

from rollout_sched.client.remote.calls import GatewayError
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.verl.gateway_client import GatewayClient

FAKE = ["--speed", "100", "--median-tokens", "40", "--vocab-size", "256"]
DRAWN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}


@pytest.fixture
def at(config):
    """A client of the gateway at a URL."""

    def make(url: str, **keys: object) -> GatewayClient:
        with open_dict(config):
            ours = {"rollout_sched": {"gateway": url, **keys}}
            config.actor_rollout_ref.rollout.custom = OmegaConf.create(ours)
        return GatewayClient(config)

    return make


def run(client: GatewayClient, *calls) -> list:
    async def main() -> list:
        try:
            return [await call(client) for call in calls]
        finally:
            await client.close()

    return asyncio.run(main())


def call(request_id="s", prompt=(1, 2, 3), **sampling):
    async def generate(client: GatewayClient):
        return await client.generate(
            request_id, prompt_ids=list(prompt), sampling_params={**DRAWN, **sampling}
        )

    return generate


def test_an_output_has_tokens_log_probs_and_versions(servers, at):
    with servers.fleet(1, fake=FAKE, serve=["--start-version", "3"]) as ours:
        with_log_probs, without = run(
            at(ours.url), call(logprobs=True), call(logprobs=False, max_tokens=7)
        )
    tokens = len(with_log_probs.token_ids)
    assert tokens > 0
    assert len(with_log_probs.log_probs) == tokens
    assert with_log_probs.stop_reason == "completed"
    assert with_log_probs.num_preempted == 0
    assert with_log_probs.extra_fields == {
        "global_steps": 3,
        "min_global_steps": 3,
        "max_global_steps": 3,
        "versions": [3] * tokens,
    }
    assert without.log_probs is None
    assert len(without.token_ids) <= 7


def test_the_turns_of_a_trajectory_stay_on_one_server(servers, at):
    with servers.fleet(2, policy="agentic", fake=FAKE) as ours:
        run(at(ours.url), *[call("s", prompt=range(1, 20 + 10 * turn)) for turn in range(4)])
        served = sorted(
            instance.metric("vllm:request_success_total") for instance in ours.instances
        )
    assert served == [0, 4]


def test_it_travels_to_actors_as_what_it_was_made_of(at):
    client = pickle.loads(pickle.dumps(at("http://127.0.0.1:1", poll_s=3)))
    with pytest.raises(GatewayError, match=r"127\.0\.0\.1:1"):
        run(client, call())


def test_errors_are_split_by_whose_fault_they_are(servers, at):
    with servers.fleet(1, fake=FAKE) as ours, pytest.raises(CallerError, match="temperature"):
        run(at(ours.url), call(temperature=-1))


def test_images_are_refused_with_the_remedy(at):
    async def with_an_image(client: GatewayClient) -> None:
        await client.generate("s", prompt_ids=[1], sampling_params={}, image_data=[object()])

    with pytest.raises(ValueError, match="image_data"):
        run(at("http://127.0.0.1:1"), with_an_image)
