"""`rollout-sched serve`: one policy, one fleet, one port."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import msgspec
from aiohttp import web

from rollout_sched.config import PolicyFile, load_policy
from rollout_sched.core import scheduler
from rollout_sched.core.errors import CallerError
from rollout_sched.core.events import InstanceJoined, InstanceLost
from rollout_sched.integrations.gateway.control import make_app
from rollout_sched.integrations.gateway.doors import AdminDoor, is_loopback, read_keys
from rollout_sched.integrations.gateway.front import Front, Limits
from rollout_sched.integrations.gateway.gateway import Gateway, MakeClient, NewInstance, notes_of
from rollout_sched.integrations.http import App, HttpServer
from rollout_sched.integrations.vllm.http_instance import HttpInstance
from rollout_sched.live.attendant import Attendant
from rollout_sched.live.live_scheduler import LiveScheduler
from rollout_sched.live.ports import InstanceClient
from rollout_sched.live.settings import DEFAULTS, Settings

Say = Callable[[str], None]

COLLECT_S = 60.0

#: For what whoever waits is told when the grace period is over, before connections are cut.
LAST_WORDS_S = 1.0


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What `serve` is told; every file is read, and every error raised, before the port is open.

    prompts_per_step  groups in a batch of the trainer's API
    max_requests      responses that may be here at once, waiting or running
    max_body          bytes of one request's body
    max_bodies        bytes of all bodies that are here
    stream_every      see `TrainerDesk`
    slots             what an instance runs at once, where it does not tell
    grace_s           seconds that running answers get to finish when the gateway stops
    """

    policy: str
    instances: list[str]
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Path | None = None
    admin_key_file: Path | None = None
    instance_api_key_file: Path | None = None
    journal: Path | None = None
    prompts_per_step: int = 64
    max_requests: int = Limits().requests
    max_body: int = 64 * 2**20
    max_bodies: int = Limits().body_bytes
    stream_every: int = 0
    seed: int = 0
    start_version: int = 0
    slots: int | None = None
    grace_s: float = 10.0


def serve(options: Options) -> None:
    """Run until SIGTERM or SIGINT. Raises CallerError, or OSError if the port is taken."""
    make_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):  # it is not built for Windows
        import uvloop

        make_loop = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(_serve(options, partial(print, flush=True)))


async def _serve(options: Options, say: Say) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    service = Service(options, say)
    try:
        await service.open()
        _spare_the_collector(loop)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await stop.wait()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)  # the next one ends it at once
        say("stopping")
    finally:
        await service.close()


def _spare_the_collector(loop: asyncio.AbstractEventLoop) -> None:
    """Look for cycles once a minute, not every few hundred objects.

    What is loaded by now stays, and requests leave next to no cycles behind, so looking finds
    little but makes everybody wait for it.
    """
    gc.collect()
    gc.freeze()
    gc.disable()

    def look() -> None:
        gc.collect()
        loop.call_later(COLLECT_S, look)

    loop.call_later(COLLECT_S, look)


class Service:
    """A gateway with its port. Make it inside a running event loop. Raises CallerError."""

    def __init__(
        self,
        options: Options,
        say: Say,
        make_client: MakeClient | None = None,
        settings: Settings = DEFAULTS,
    ) -> None:
        self.options = options
        self._say = say
        policy = load_policy(options.policy)
        keys = _keys(options.api_key_file)
        door = AdminDoor(_keys(options.admin_key_file))
        self._make_client = make_client or _client_maker(options)
        self._clients = [self._make_client(NewInstance(url)) for url in options.instances]
        _check_once([client.name for client in self._clients])
        self.live = LiveScheduler(
            policy,
            options.prompts_per_step,
            version=options.start_version,
            seed=options.seed,
            stream_every=options.stream_every,
            journal=options.journal,
            settings=settings,
        )
        limits = Limits(requests=options.max_requests, body_bytes=options.max_bodies)
        self.front = Front(self.live.driver, limits=limits, keys=keys)
        self.gateway = Gateway(self.live, self.front, self._make_client)
        self.live.driver.watch(self._announce, InstanceJoined, InstanceLost)
        app = make_app(self.gateway, door, max_body=options.max_body)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=options.grace_s
        )
        self._server: HttpServer | None = None
        self.url = ""
        self._greet(policy, keys, door)

    async def open(self) -> None:
        """Open the port and take the instances in; who is not up yet joins later."""
        await self._runner.setup()
        assert self._runner.server is not None  # made by setup
        app: App = self.front
        self._server = HttpServer(app, self._runner.server, max_body=self.options.max_body)
        listener = await self._server.listen(self.options.host, self.options.port)
        port = listener.sockets[0].getsockname()[1]
        host = self.options.host
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        clients, self._clients = self._clients, []
        await asyncio.gather(*(self._take_in(client) for client in clients))
        self._say(f"listening on {self.url}")

    async def close(self) -> None:
        """Accept no more, let what runs finish for the grace period, then stop."""
        loop = asyncio.get_running_loop()
        last_words = loop.call_later(self.options.grace_s, self.front.shut_down)
        await self.gateway.handout.close()
        if self._server is not None:
            await self._server.close(self.options.grace_s + LAST_WORDS_S)
        last_words.cancel()
        await self._runner.cleanup()
        await self.live.close()
        for client in self._clients:
            await client.close()

    async def _take_in(self, client: InstanceClient) -> None:
        if await self.live.driver.add_instance(client, patient=True) is None:
            why = self.live.driver.attendants[client.name].away
            self._say(f"instance {client.name}: not up yet, joins when it is ({why})")

    def _greet(self, policy: PolicyFile, keys: list[str], door: AdminDoor) -> None:
        roles = ", ".join(f"{role} {cls.__name__}" for role, (cls, _) in policy.roles.items())
        build = "" if scheduler.__file__.endswith(".py") else ", compiled"
        program = f"rollout-sched {version('rollout-sched')}{build}"
        self._say(f"{program}: policy {policy.name} ({roles})")
        if not keys and not is_loopback(self.options.host):
            self._say(
                f"anybody who reaches {self.options.host} may use this gateway; "
                f"--api-key-file closes it"
            )
        if not door.has_keys:
            self._say("/admin and the trainer's API are open to programs on this machine only")

    def _announce(self, event: InstanceJoined | InstanceLost) -> None:
        """Who has come, with what is missing there, and who has gone."""
        if isinstance(event, InstanceJoined):
            for line in _described(self.live.driver.attendants[event.instance]):
                self._say(line)
        else:
            self._say(f"instance {event.instance}: lost ({event.reason})")


def _described(attendant: Attendant) -> list[str]:
    told = attendant.description
    assert told is not None  # it has joined
    offers = ", ".join(sorted(told.capabilities)) or "nothing beyond generation"
    line = (
        f"instance {attendant.name}: {told.model or 'a model'}, {told.slots} slots, "
        f"{told.kv_tokens} KV tokens, up to {told.max_model_len} tokens a request; offers {offers}"
    )
    return [line, *(f"  {note}" for note in notes_of(attendant))]


def _client_maker(options: Options) -> MakeClient:
    keys = _keys(options.instance_api_key_file)
    if len(keys) > 1:
        raise CallerError(f"{options.instance_api_key_file}: holds {len(keys)} keys; give one")
    key = keys[0] if keys else None

    def make(new: NewInstance) -> InstanceClient:
        return HttpInstance(new.url, api_key=new.api_key or key, slots=new.slots or options.slots)

    return make


def _keys(path: Path | None) -> list[str]:
    return [] if path is None else read_keys(path)


def _check_once(names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise CallerError(f"--instance {name} is there twice")
