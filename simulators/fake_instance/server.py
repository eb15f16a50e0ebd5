"""The application of a simulated server: endpoints, API key, faults."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

import msgspec
from aiohttp import web

from rollout_sched.live.ports import InstanceError
from rollout_sched.simulators.fake_instance import errors
from rollout_sched.simulators.fake_instance.adapters import Adapters
from rollout_sched.simulators.fake_instance.chat import Chat
from rollout_sched.simulators.fake_instance.codec import decode, reply
from rollout_sched.simulators.fake_instance.completions import CompletionsDialect
from rollout_sched.simulators.fake_instance.control import ControlEndpoints
from rollout_sched.simulators.fake_instance.dialects import EndpointDialect
from rollout_sched.simulators.fake_instance.engine import Engine, EngineSettings
from rollout_sched.simulators.fake_instance.errors import Refusal
from rollout_sched.simulators.fake_instance.faults import Fault, Switchboard, Where
from rollout_sched.simulators.fake_instance.generate import GenerateDialect, SkyRLGenerate
from rollout_sched.simulators.fake_instance.request_parsing import RequestLimits
from rollout_sched.simulators.fake_instance.serving import hang_up, serve
from rollout_sched.simulators.fake_instance.status import Status
from rollout_sched.simulators.fake_instance.tokenizer import Tokenizer
from rollout_sched.simulators.fake_instance.trainer_paths import TrainerPaths
from rollout_sched.simulators.fake_instance.updates import Updates

_GUARDED = ("/v1", "/inference")
_NEVER_STRUCK = ("/health", "/v1/models", "/fake/")
_WEIGHT_CALLS = ("/collective_rpc", "/update_weights", "/areal_update_weights")
_LARGEST_BODY = 1 << 28
#: As vLLM's VLLM_HTTP_TIMEOUT_KEEP_ALIVE, seconds.
_KEEP_ALIVE_S = 5.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Restart(msgspec.Struct, forbid_unknown_fields=True):
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    weight_version: str = ""  # that of its first start


class _Weights(msgspec.Struct, forbid_unknown_fields=True):
    """Set from outside: the label, without any call that a fleet sees; and the reported label."""

    weight_version: str = ""  # "": unchanged
    says: str | None = ""  # "": the true label; None: no label


class FakeServer:
    """One simulated vLLM server. Make it in a running event loop; `app` is the application."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        api_key: str = "",
        faults: Sequence[Fault] = (),
    ) -> None:
        self.engine = Engine(settings)
        self.switchboard = Switchboard(settings.seed)
        for fault in faults:
            self.switchboard.set(fault)
        self._authorization = f"Bearer {api_key}".encode() if api_key else b""
        self._limits = RequestLimits(
            settings.model,
            settings.spec.max_model_len,
            settings.stream_interval,
            self.engine.adapters,
            settings.vocabulary,
        )
        self._open: dict[asyncio.Transport | None, None] = {}  # of the requests in flight
        self._down = False
        self._runner: web.AppRunner | None = None
        self.dialects: dict[str, EndpointDialect] = {
            dialect.path: dialect
            for dialect in (GenerateDialect(), SkyRLGenerate(), CompletionsDialect(), Chat())
        }
        self.app = web.Application(
            client_max_size=_LARGEST_BODY, middlewares=[self._answer_errors, self._let_in]
        )
        for endpoints in (Status, ControlEndpoints, Updates, TrainerPaths, Adapters, Tokenizer):
            self.app.add_routes(endpoints(self.engine).routes())
        self.app.add_routes([web.post(path, self._generate) for path in self.dialects])
        self.app.add_routes(
            [
                web.get("/fake/fault", self._list_faults, allow_head=False),
                web.post("/fake/fault", self._set_fault),
                web.delete("/fake/fault", self._clear_faults),
                web.post("/fake/restart", self._restart_now),
                web.post("/fake/weights", self._set_weights),
            ]
        )

    # -- life ------------------------------------------------------------------------------

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which the system chooses if it is 0."""
        self._runner = web.AppRunner(
            self.app,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=_KEEP_ALIVE_S,
            shutdown_timeout=0.0,
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, backlog=1024).start()
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        """Stop at once: waiting requests get no answer."""
        self._hang_up_all()
        await self.engine.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def restart(self, seconds: float, label: str = "") -> None:
        """Close every connection, stay away for `seconds`, and start again with the initial weights
        or those of another label."""
        self._down = True
        self._hang_up_all()
        await self.engine.restart(label)
        asyncio.get_running_loop().call_later(seconds, self._come_back)

    def _come_back(self) -> None:
        self._down = False

    def _hang_up_all(self) -> None:
        for transport in tuple(self._open):
            if transport is not None:
                transport.abort()

    # -- every request ---------------------------------------------------------------------

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        transport = request.transport
        self._open[transport] = None
        try:
            return await handler(request)
        except Refusal as refusal:
            return _refused(refusal)
        except InstanceError as error:
            return _refused(Refusal(500, str(error)))
        finally:
            self._open.pop(transport, None)

    @web.middleware
    async def _let_in(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._down:
            return hang_up(request)
        if self._authorization and request.path.startswith(_GUARDED):
            told = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not secrets.compare_digest(told, self._authorization):
                return web.json_response({"error": "Unauthorized"}, status=401)
        if self.switchboard.faults and not request.path.startswith(_NEVER_STRUCK):
            fault = self.switchboard.draw(self._where(request))
            if fault is not None:
                return await self._struck(fault, request, handler)
        return await handler(request)

    def _where(self, request: web.Request) -> Where:
        if request.path in self.dialects:
            return "generate"
        return "weights" if request.path.startswith(_WEIGHT_CALLS) else "control"

    async def _struck(
        self, fault: Fault, request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        match fault.fault:
            case "silent":
                await asyncio.Event().wait()
            case "garbage":
                return web.Response(body=b"\x15\x03<garbage", content_type="application/json")
            case "reset":
                return hang_up(request)
            case "restart":
                await self.restart(fault.seconds)
                return hang_up(request)
            case "error_500" | "error_503":
                raise Refusal(int(fault.fault[-3:]), f"{fault.fault}, as ordered")
            case "update_500":
                raise self.engine.weights.tear("the weights could not be loaded, as ordered")
            case "slow":
                await asyncio.sleep(fault.seconds)
            case "twice" | "cut" | "another" | "unfinished" | "wrong_version" | "short_prompt":
                if request.path in self.dialects:
                    return await self._generate(request, fault.fault)
        return await handler(request)

    async def _generate(self, request: web.Request, fault: str = "") -> web.StreamResponse:
        dialect = self.dialects[request.path]
        return await serve(request, dialect, self.engine, self._limits, fault)

    # -- switches --------------------------------------------------------------------------

    async def _list_faults(self, _: web.Request) -> web.Response:
        return reply({"faults": list(self.switchboard.faults.values())})

    async def _set_fault(self, request: web.Request) -> web.Response:
        self.switchboard.set(decode(await request.read(), Fault))
        return await self._list_faults(request)

    async def _restart_now(self, request: web.Request) -> web.StreamResponse:
        asked = decode(await request.read(), _Restart)
        await self.restart(asked.seconds, asked.weight_version)
        return hang_up(request)

    async def _set_weights(self, request: web.Request) -> web.StreamResponse:
        asked = decode(await request.read(), _Weights)
        weights = self.engine.weights
        if asked.weight_version:
            await weights.set_label(asked.weight_version)
        weights.says = asked.says
        return reply({"weight_version": weights.label, "says": weights.told})

    async def _clear_faults(self, request: web.Request) -> web.Response:
        self.switchboard.faults.clear()
        return await self._list_faults(request)


def _refused(refusal: Refusal) -> web.Response:
    return reply(errors.content(refusal), refusal.status)
