"""verl's client of LLM servers, before our gateway: for whoever keeps verl's agent loops."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec
from omegaconf import OmegaConf
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.control_plane.trainer_calls import GatewayError
from rollout_sched.integrations.verl import generate_call
from rollout_sched.integrations.verl.settings import RoomSettings, settings_of
from rollout_sched.integrations.vllm.protocol import endpoints

#: What a prompt may hold besides text; the gateway's answers are of token ids alone.
_MULTI_MODAL = ("image_data", "video_data", "audio_data")

#: Seconds that a connection may take to come about.
_CONNECT_S = 10.0


def room_settings(config: Any) -> RoomSettings:
    """Our table of verl's whole configuration. Raises ConfigError."""
    return settings_of(OmegaConf.to_container(config.actor_rollout_ref.rollout).get("custom"))


def lengths_of(config: Any) -> generate_call.RolloutLengths:
    """Of verl's whole configuration."""
    rollout = config.actor_rollout_ref.rollout
    return generate_call.RolloutLengths(
        rollout.prompt_length, rollout.response_length, rollout.get("max_model_len")
    )


def check_text(others: Mapping[str, Any]) -> None:
    """Raises ValueError if a call brings more than text."""
    given = [name for name in _MULTI_MODAL if others.get(name) is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)}: what is generated here is made of token ids alone; leave verl's "
            "own client in place for prompts with images, video or audio"
        )


class GatewayClient(LLMServerClient):
    """`LLMServerClient` (verl 0.9.1) whose calls are scheduled by a gateway.

    The turns of a `request_id` are a session, so they go where their KV cache is. What is
    interrupted, moved or resumed comes back whole, so there is nothing to retry.

    It travels to Ray actors as what it was made of; connections are made where it is used.
    """

    def __init__(self, config: Any, settings: RoomSettings | None = None) -> None:
        super().__init__(config=config)
        self._settings = settings or room_settings(config)
        self._url = self._settings.gateway_url
        self._lengths = lengths_of(config)
        self._model = ""
        self._session: aiohttp.ClientSession | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.config, self._settings)

    @rollout_trace_op  # type: ignore[untyped-decorator]
    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        priority: int = 0,
        **others: Any,
    ) -> TokenOutput:
        """As verl's. Raises CallerError for what the call is at fault for, GatewayError for all
        else, ValueError for what is not text."""
        check_text(others)
        model = await self._model_name()
        body = generate_call.body_of(model, prompt_ids, sampling_params, self._lengths, priority)
        headers = {"X-Session-ID": request_id}
        answer = await self._send("POST", endpoints.GENERATE, body, headers)
        made = generate_call.read(answer)
        return TokenOutput(
            token_ids=made.token_ids,
            log_probs=made.log_probs,
            stop_reason=made.stop_reason,
            num_preempted=made.interruptions,
            extra_fields=made.extra_fields,
        )

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _model_name(self) -> str:
        """The fleet's; asked once."""
        if not self._model:
            models = msgspec.json.decode(await self._send("GET", endpoints.MODELS))
            self._model = models["data"][0]["id"]
        return self._model

    async def _send(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> bytes:
        url = self._url + path
        try:
            async with self._connections().request(
                method, url, data=body, headers=headers
            ) as response:
                answer, status = await response.read(), response.status
        except (aiohttp.ClientError, OSError) as error:
            raise GatewayError(f"{url}: {error or type(error).__name__}") from error
        if status < 300:
            return answer
        text = f"{url} answered {status}: {answer[:500].decode(errors='replace')}"
        if status < 500:
            raise CallerError(text)
        raise GatewayError(text, status)

    def _connections(self) -> aiohttp.ClientSession:
        """As many as there are calls: how many go to the servers at once is the gateway's affair.
        An answer takes what it takes."""
        if self._session is None:
            headers = {"Content-Type": "application/json"}
            key = self._settings.api_key
            if key is not None:
                headers["Authorization"] = f"Bearer {key}"
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
            connector = aiohttp.TCPConnector(limit=0, loop=asyncio.get_running_loop())
            self._session = aiohttp.ClientSession(
                headers=headers, timeout=timeout, connector=connector
            )
        return self._session
