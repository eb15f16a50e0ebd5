"""verl's client of LLM servers for our gateway, under verl's own, unchanged agent loops."""

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

from rollout_sched.client import GatewayError
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.verl import generate_call
from rollout_sched.integrations.verl.settings import RoomSettings, settings_of
from rollout_sched.integrations.vllm.protocol import endpoints

#: Arguments for input other than text; the gateway generates from token ids only.
_MULTI_MODAL = ("image_data", "video_data", "audio_data")

#: Timeout for opening a connection, in seconds.
_CONNECT_S = 10.0


def room_settings(config: Any) -> RoomSettings:
    """Our table in verl's whole configuration. Raises ConfigError."""
    return settings_of(OmegaConf.to_container(config.actor_rollout_ref.rollout).get("custom"))


def lengths_of(config: Any) -> generate_call.RolloutLengths:
    """The length limits in verl's whole configuration."""
    rollout = config.actor_rollout_ref.rollout
    return generate_call.RolloutLengths(
        rollout.prompt_length, rollout.response_length, rollout.get("max_model_len")
    )


def check_text(others: Mapping[str, Any]) -> None:
    """Raises ValueError if a call has input other than text."""
    given = [name for name in _MULTI_MODAL if others.get(name) is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)}: only prompts of token ids are supported; use verl's own client "
            "for prompts with images, video or audio"
        )


class GatewayClient(LLMServerClient):
    """`LLMServerClient` (verl 0.9.1) whose calls are scheduled by a gateway.

    The turns of a `request_id` are a session, so the scheduler sends them to the instance that
    holds their KV cache. A request that is interrupted, moved and resumed still returns one whole
    answer, so the client retries nothing.

    Pickling keeps the arguments only; each process opens its own connections.
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
        """Like verl's. Raises CallerError if the call is at fault, ValueError if it has input other
        than text, and GatewayError in all other cases."""
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
        """The model name of the fleet; requested once."""
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
        """One connection for each open call, without a limit: the gateway limits what goes to the
        servers. There is no timeout for an answer."""
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
