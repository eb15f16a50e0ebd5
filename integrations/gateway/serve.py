"""What `rollout-sched serve` runs: one policy, one fleet, one port."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from rollout_sched import __version__
from rollout_sched import process as event_loop
from rollout_sched import process as log_lines
from rollout_sched.config import PolicyFile, load_policy
from rollout_sched.core import scheduler
from rollout_sched.core.errors import CallerError, reason_of
from rollout_sched.core.model.events import InstanceJoined
from rollout_sched.integrations.gateway.control_plane.app import STOPPING, WATCH, make_app
from rollout_sched.integrations.gateway.control_plane.auth import (
    Access,
    AccessControl,
    AddedInstance,
    AllowList,
    checked_url,
    is_loopback,
    read_access,
    read_instance_keys,
)
from rollout_sched.integrations.gateway.control_plane.gateway import (
    Gateway,
    MakeClient,
    NewInstance,
    notes_of,
)
from rollout_sched.integrations.gateway.data_plane.data_plane import (
    CLOSED,
    NO_INSTANCE,
    DataPlane,
)
from rollout_sched.integrations.gateway.data_plane.reply import Responses
from rollout_sched.integrations.gateway.endpoints_file import (
    Endpoint,
    EndpointsFile,
    read_endpoints,
)
from rollout_sched.integrations.gateway.options import (
    Options,
    add_gateway_flags,
    add_worker_flags,
    given_options,
    limits_of,
)
from rollout_sched.integrations.gateway.worker_processes import WorkerProcesses
from rollout_sched.integrations.http import LINGER_S, ServerLimits
from rollout_sched.integrations.http.server import App, HttpServer
from rollout_sched.integrations.sglang import EngineInstance
from rollout_sched.integrations.vllm.weights import WeightRoots
from rollout_sched.link import Hub
from rollout_sched.live import LiveScheduler, Settings, settings_of
from rollout_sched.live.instances import InstanceSupervisor
from rollout_sched.live.ports import InstanceClient
from rollout_sched.process import install_extra

log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------
# The lines that a gateway prints at start and when an instance joins: one line for each thing that
# the operator may want to change.


def startup_report(
    policy: PolicyFile, auth: AccessControl, host: str, *, keeps_sessions: bool
) -> Iterator[str]:
    """`keeps_sessions`: whether session names have an effect."""
    roles = ", ".join(f"{role} {cls.__name__}" for role, (cls, _) in policy.roles.items())
    build = "" if scheduler.__file__.endswith(".py") else ", compiled"
    yield f"rollout-sched {__version__}{build}: policy {policy.name} ({roles})"
    if not auth.takes_keys(Access.CLIENT) and not is_loopback(host):
        yield f"any client that can reach {host} may use this gateway; --api-key-file closes it"
    if not keeps_sessions:
        yield "X-Session-ID is ignored: the policy's [affinity] is none"
    if auth.is_open:
        yield "/admin and the trainer's API are open to programs on this machine only"
    if auth.shuts_admins_out:
        yield "/admin is closed; --admin-key-file or --admin-socket opens it"


def described(supervisor: InstanceSupervisor) -> list[str]:
    """Lines about an instance that has joined: its properties, and features that it lacks."""
    told = supervisor.description
    assert told is not None  # it has joined
    offers = ", ".join(sorted(told.capabilities)) or "nothing beyond generation"
    line = (
        f"instance {supervisor.name}: {told.model or 'a model'}, {told.slots} slots, "
        f"{told.kv_tokens} KV tokens, up to {told.max_model_len} tokens a request; offers {offers}"
    )
    return [line, *(f"  {note}" for note in notes_of(supervisor))]


class AdminSocket:
    """A Unix socket for administrators: the permission to open its file replaces a key. The socket
    is created at `path` and removed when it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener: asyncio.AbstractServer | None = None

    async def open(self, connect: Callable[[], asyncio.BaseProtocol]) -> None:
        """Only its owner can open it: connections are possible only after its mode is set.
        `connect` makes the protocol of each connection. Raises CallerError."""
        _clear_away(self.path)
        taken = socket.socket(socket.AF_UNIX)
        try:
            taken.bind(str(self.path))
            self.path.chmod(0o600)
        except OSError as error:
            taken.close()
            raise CallerError(f"--admin-socket {self.path}: {reason_of(error)}") from error
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_unix_server(connect, sock=taken)

    def close(self) -> None:
        """Accept no new connections. Does nothing if the socket was never opened."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
            self.path.unlink(missing_ok=True)


def _clear_away(path: Path) -> None:
    """Remove a stale socket, on which no process listens. Raises CallerError if one does."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise CallerError(f"--admin-socket {path}: another gateway listens on it")


Say = Callable[[str], None]


#: Seconds to tell waiting clients that the gateway stops, before their connections are closed.
LAST_WORDS_S = 1.0

#: Seconds that the last spans get to reach their collector when the gateway stops.
LAST_SPANS_S = 5.0

#: Seconds that requests wait for the first instance of a gateway, and between two lines about it.
FIRST_INSTANCE_S = 10.0

_STOPPING = (signal.SIGTERM, signal.SIGINT)


def serve(options: Options) -> None:
    """Run until SIGTERM or SIGINT. Raises CallerError, or OSError if the port is taken."""
    log_lines.set_up(options.log_level, options.log_format)
    say: Say = log.info if options.log_format == "json" else partial(print, flush=True)
    event_loop.run(_serve(options, say))


async def _serve(options: Options, say: Say) -> None:
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[signal.Signals] = loop.create_future()
    service = Service(options, say)

    def stop(number: signal.Signals) -> None:
        stop_at_once_from_now_on()
        stopped.set_result(number)

    for number in _STOPPING:
        loop.add_signal_handler(number, stop, number)

    def stop_at_once_from_now_on() -> None:
        for number in _STOPPING:
            loop.remove_signal_handler(number)

    opening = asyncio.ensure_future(service.open())
    either: set[asyncio.Future[Any]] = {opening, stopped}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            opening.result()
            event_loop.spare_the_collector()
            if await stopped == signal.SIGTERM:  # from a supervisor, not from a terminal
                service.leave()
                await asyncio.sleep(options.drain_s)
        say("stopping")
    finally:
        stop_at_once_from_now_on()
        opening.cancel()
        await asyncio.wait({opening})
        await service.close()


class Service:
    """A gateway with its port. Create it inside a running event loop. Raises CallerError.

    `settings`: settings of the driver; None takes them from the options and the policy file.
    """

    def __init__(
        self,
        options: Options,
        say: Say,
        make_client: MakeClient | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.options = options
        self._say = say
        policy = load_policy(options.policy, allow_code=options.allow_code)
        auth = read_access(
            options.api_key_file,
            options.trainer_key_file,
            options.admin_key_file,
            has_socket=options.admin_socket is not None,
        )
        self._page_key = auth.page_key if is_loopback(options.host) else ""
        engines: set[str] = set()
        ours = make_client or _client_maker(options, engines, added=False)
        self._clients = [ours(NewInstance(checked_url(url))) for url in options.instances]
        named = [client.name for client in self._clients]
        _check_once(named)
        self._endpoints = self._watched(options.endpoints, ours)
        self.live = LiveScheduler(
            policy, options, settings=settings or settings_of(policy, options.live)
        )
        logs = options.access_log
        self.data_plane = DataPlane(
            self.live.driver,
            resumable=self.live.driver.view.keeps_partial,
            limits=limits_of(options),
            keys=auth.opening(Access.CLIENT),
            trainer_keys=auth.opening(Access.TRAINER),
            responses=Responses(logs=logs),
        )
        self.gateway = Gateway(
            self.live,
            self.data_plane,
            make_client or _client_maker(options, engines, added=True),
            AllowList(options.allow_instances, named),
            WeightRoots(options.weights_roots),
            Responses(logs=logs),
            lists_itself=options.list_itself,
        )
        self._workers = WorkerProcesses(options, Hub(self.live)) if options.workers else None
        self._joined = asyncio.Event()
        self._waits: asyncio.Task[None] | None = None  # for the first instance
        self.live.driver.pump.watch(self._announce, InstanceJoined)
        self.app = make_app(
            self.gateway, auth, max_body=options.max_body, max_samples=options.max_samples
        )
        self._end_tracing = _tracing(self.live, self.app, options.otlp) if options.otlp else None
        self._runner = _runner(self.app, options.grace_s)
        self._server: HttpServer | None = None
        self.url = ""
        self._admin_socket = AdminSocket(options.admin_socket) if options.admin_socket else None
        keeps_sessions = self.live.driver.view.keeps_sessions
        for line in startup_report(policy, auth, options.host, keeps_sessions=keeps_sessions):
            say(line)

    async def open(self) -> None:
        """Open the port and add the instances; an instance that is not up yet joins later."""
        await self._runner.setup()
        assert self._runner.server is not None  # made by setup
        app: App = self.data_plane
        limits = ServerLimits(max_body=self.options.max_body, max_bodies=self.options.max_bodies)
        self._server = HttpServer(app, self._runner.server, limits)
        self.gateway.turned_away = self._server.turned_away
        self.gateway.figures.lag.start()
        listener = await self._listen(self._server)
        if self._admin_socket is not None:
            await self._admin_socket.open(self._server)
            self._say(f"/admin and the trainer's API are served at {self._admin_socket.path}")
        self.url = self._url(listener.sockets[0].getsockname()[1])
        clients, self._clients = self._clients, []
        await asyncio.gather(*(self._take_in(client) for client in clients))
        if self._endpoints is not None:
            await self._endpoints.open()
        self._waits = asyncio.create_task(self._wait_for_an_instance())
        if self._page_key and self.options.log_format == "text":
            self._say(f"watch it: {self.url}/#key={self._page_key}")
        if self._workers is None:
            self._say(f"listening on {self.url}")
        else:
            port = await self._workers.open(self.url)
            self._say(f"everything but clients' calls: {self.url}")
            self._say(f"listening on {self._url(port)}, with {self.options.workers} workers")

    def _url(self, port: int) -> str:
        host = self.options.host
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def leave(self) -> None:
        """/health is 503 from now on, but calls are still taken."""
        self.gateway.leaving = True
        if self._workers is not None:
            self._workers.leave()

    async def _listen(self, server: HttpServer) -> asyncio.Server:
        host, flag, port = self.options.host, "port", self.options.port
        if self._workers is not None:
            flag, port = "control-port", self.options.control_port
        try:
            return await server.listen(host, port)
        except OSError as error:
            reason = os.strerror(error.errno).lower() if error.errno else str(error)
            raise CallerError(f"--host {host} --{flag} {port}: {reason}") from error

    async def close(self) -> None:
        """Accept no new calls, let running requests finish during the grace period, then stop.

        The journal is closed even if a step fails.
        """
        loop = asyncio.get_running_loop()
        last_words = loop.call_later(self.options.grace_s, self._say_that_it_stops)
        if self._waits is not None:
            self._waits.cancel()
        try:
            if self._admin_socket is not None:
                self._admin_socket.close()
            if self._endpoints is not None:
                await self._endpoints.close()
            self.app[WATCH].close()
            self.gateway.trainer.close()
            ends = [] if self._workers is None else [self._workers.close()]
            if self._server is not None:
                ends.append(self._server.close(self.options.grace_s + LAST_WORDS_S))
            await asyncio.gather(*ends)
            await self._runner.cleanup()
        finally:
            last_words.cancel()
            self.gateway.figures.lag.stop()
            await self.live.close()
            if self._end_tracing is not None:
                await _sent(self._end_tracing)
            for client in self._clients:
                await client.close()

    def _say_that_it_stops(self) -> None:
        """Tell the clients that still wait when the grace period is over."""
        self.data_plane.refuse(CLOSED)
        self.app[STOPPING].set()

    async def _take_in(self, client: InstanceClient) -> None:
        if await self.live.driver.add_instance(client, patient=True) is None:
            why = self.live.driver.supervisors[client.name].reason
            self._say(f"instance {client.name}: away, joins when it is ready ({why})")

    def _watched(self, path: Path | None, make_client: MakeClient) -> EndpointsFile | None:
        if path is None:
            return None
        read_endpoints(path)  # report errors in the file before anything is created

        async def add(endpoint: Endpoint) -> None:
            new = NewInstance(checked_url(endpoint.url), labels=endpoint.named_labels)
            await self._take_in(make_client(new))

        async def remove(url: str) -> None:
            await self.live.driver.remove_instance(url, drain=True)

        return EndpointsFile(path, add, remove)

    async def _wait_for_an_instance(self) -> None:
        """Until one has joined, say what is missing, and refuse calls: a client that waits in
        silence does not learn that a URL is wrong. A trainer's groups wait."""
        driver, data_plane = self.live.driver, self.data_plane
        refused = -1  # when the last line was written
        while True:
            try:
                async with asyncio.timeout(FIRST_INSTANCE_S):
                    await self._joined.wait()
                data_plane.accept()
                return
            except TimeoutError:
                waiting = driver.view.waiting
                data_plane.refuse(NO_INSTANCE)
                if waiting or data_plane.refused != refused:
                    away = [f"{name}: {one.reason}" for name, one in driver.supervisors.items()]
                    few = "; ".join(away[:3]) or "none is named"
                    log.warning("%s, and %d requests wait (%s)", NO_INSTANCE, waiting, few)
                refused = data_plane.refused

    def _announce(self, event: InstanceJoined) -> None:
        """Print a description of an instance that has joined, and what it lacks."""
        self._joined.set()
        for line in described(self.live.driver.supervisors[event.instance]):
            self._say(line)


def _client_maker(options: Options, engines: set[str], *, added: bool) -> MakeClient:
    """Makes clients for the instances of the operator, who names them at start or in the endpoints
    file, or for those that a call has `added`: they do not get the operator's common key. All have
    one of the `engines`."""
    keys = read_instance_keys(options.instance_api_key_file, options.instances)
    kind, common = (AddedInstance, None) if added else (EngineInstance, keys.common)

    def make(new: NewInstance) -> InstanceClient:
        return kind(
            new.url,
            api_key=new.api_key or keys.key_of(new.url) or common,
            slots=new.slots or options.slots,
            kv_tokens=new.kv_tokens or options.kv_tokens,
            labels=new.labels.values(),
            engines=engines,
        )

    return make


async def _sent(end_tracing: Callable[[], None]) -> None:
    try:
        await event_loop.off_loop(end_tracing, LAST_SPANS_S)
    except TimeoutError:
        log.warning("the collector has not taken the last spans within %g s", LAST_SPANS_S)


def _tracing(live: LiveScheduler, app: web.Application, url: str) -> Callable[[], None]:
    """Raises CallerError if the OpenTelemetry packages are not installed."""
    try:
        from rollout_sched.integrations.otel import export
    except ImportError as error:
        raise CallerError(f"--otlp: {error}; {install_extra('otel')}") from error
    return export(live.driver, app, url)


def _runner(app: web.Application, grace_s: float) -> web.AppRunner:
    """The aiohttp runner of the control plane."""
    return web.AppRunner(
        app,
        access_log=None,
        logger=_log_of_aiohttp(),
        handler_cancellation=True,
        auto_decompress=False,  # bodies are passed on unchanged, and no zip bomb is unpacked here
        shutdown_timeout=grace_s + LAST_WORDS_S,
        lingering_time=LINGER_S,
    )


def _log_of_aiohttp() -> logging.Logger:
    """A logger that drops clients' protocol errors: they get a 400 and would fill the log."""
    log = logging.getLogger(f"{__name__}.aiohttp")
    if not log.filters:
        log.addFilter(_is_no_client_s_fault)
    return log


def _is_no_client_s_fault(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _check_once(names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise CallerError(f"--instance {name} is given twice")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `rollout-sched serve`."""
    add_gateway_flags(parser)
    add_worker_flags(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    given = given_options(options)
    if not (given.instances or given.endpoints):
        raise CallerError("no instance is named: use --instance URL or --endpoints FILE")
    serve(given)
