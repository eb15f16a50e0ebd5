"""A whole gateway on a port of its own, in front of scripted instances with real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web, web_app

from rollout_sched.integrations.gateway.control_plane.gateway import NewInstance
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.gateway.serve import Service
from rollout_sched.integrations.http import Pool
from rollout_sched.integrations.vllm.control import Throttle
from rollout_sched.integrations.vllm.proxy import ProxyCalls
from rollout_sched.live.ports import InstanceClient, InstanceError, InstanceGone
from tests.live.scripted import Scripted

MODEL = "tiny"


class Upstream(Scripted):
    """An instance whose control goes by the script and whose HTTP goes to a server of the test.

    `answers` has a status and a body for a path; other paths are answered with what was asked.
    """

    def __init__(self, name: str = "http://a:1") -> None:
        super().__init__(name)
        self.asked: list[dict[str, Any]] = []
        self.answers: dict[str, tuple[int, Any]] = {}
        self.request_headers = [(b"authorization", b"Bearer instance")]
        self.answering: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
        self.stream: asyncio.Queue[bytes | None] | None = None
        self.workers = 1
        self.adapters: tuple[str, ...] = ()
        self.pool: Pool
        self._server: web.AppRunner

    async def open(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._server = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, auto_decompress=False
        )
        await self._server.setup()
        await web.TCPSite(self._server, "127.0.0.1", 0).start()
        self.pool = Pool(f"http://127.0.0.1:{self._server.addresses[0][1]}")

    async def shut(self) -> None:
        self.pool.close()
        await self.go_down()

    async def go_down(self) -> None:
        """Its server is gone; whoever asks is refused the connection."""
        await self._server.cleanup()

    async def list_models(self) -> tuple[str, ...]:
        if self.mute:
            raise InstanceError(f"{self.name}: no answer")
        return (self.description.model, *self.adapters)

    async def world_size(self) -> int:
        return self.workers

    def pass_on(
        self,
        order_id: str,
        engine_id: str,
        path: str,
        header_lines: bytes,
        body: bytes,
        receiver: Any,
    ) -> Any:
        """Aborts go by the script."""
        calls = ProxyCalls(self.pool, b"authorization: Bearer instance\r\n", Throttle(10_000, ""))
        return calls.pass_on(order_id, engine_id, path, header_lines, body, receiver)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.answering is not None:
            return await self.answering(request)
        path = request.raw_path
        asked = {
            "method": request.method,
            "path": path,
            "headers": {name.lower(): value for name, value in request.headers.items()},
            "body": (await request.read()).decode(errors="replace"),
        }
        self.asked.append(asked)
        if self.stream is not None:
            response = web.StreamResponse(headers={"X-Of-Instance": "yes"})
            await response.prepare(request)
            while (part := await self.stream.get()) is not None:
                await response.write(part)
            return response
        status, body = self.answers.get(path, (200, asked))
        if isinstance(body, bytes):
            return web.Response(status=status, body=body)
        return web.json_response(body, status=status, headers={"X-Of-Instance": "yes"})


class House:
    """`async with House(Upstream()) as house`: a gateway, and a client session to it."""

    def __init__(self, *instances: Upstream, admin_key: str = "", **options: Any) -> None:
        self.instances = {instance.name: instance for instance in instances}
        self.said: list[str] = []
        self.auth = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        self._options = {
            "policy": "round_robin_sync",
            "instances": list(self.instances),
            "port": 0,
            "prompts_per_step": 1,
            "grace_s": 0.5,
            **options,
        }
        self.service: Service
        self.session: aiohttp.ClientSession

    def make_client(self, new: NewInstance) -> InstanceClient:
        if new.url not in self.instances:
            raise InstanceGone(f"{new.url}: connection refused")
        return self.instances[new.url]

    async def __aenter__(self) -> House:
        for instance in self.instances.values():
            await instance.open()
        self.service = Service(Options(**self._options), self.said.append, self.make_client)
        try:
            await self.service.open()
        except BaseException:
            await self.service.close()
            for instance in self.instances.values():
                await instance.shut()
            raise
        self.session = aiohttp.ClientSession(
            self.service.url, connector=aiohttp.TCPConnector(force_close=True)
        )
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.session.close()
        await self.service.close()
        for instance in self.instances.values():
            await instance.shut()
        self.service.live.driver.pump.scheduler.check_invariants()
        # aiohttp remembers every application that has answered.
        web_app._cached_build_middleware.cache_clear()

    @property
    def driver(self) -> Any:
        return self.service.live.driver

    async def ask(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, Any]:
        """(status, body); the body as JSON if it is."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.request(
            method, path, json=body, headers={**self.auth, **named}
        ) as response:
            assert response.headers["Connection"] == "close"
            if response.content_type == "application/json":
                return response.status, await response.json()
            return response.status, await response.text()
