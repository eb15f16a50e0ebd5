"""A front in its own process: it takes clients' calls for a scheduler in another process.

It is the data plane with a `link.FrontCalls` in place of a driver: no scheduler, no store, no
control plane. It asks an instance to describe itself at the first request that it sends to it;
other paths are answered with 307 and the scheduler's URL.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from urllib.parse import urlsplit

from prometheus_client.metrics_core import Metric

from rollout_sched.integrations.gateway import families
from rollout_sched.integrations.gateway.control_plane.auth import (
    Access,
    checked_url,
    read_access,
    read_instance_keys,
)
from rollout_sched.integrations.gateway.data_plane.call import JSON, error_body
from rollout_sched.integrations.gateway.data_plane.data_plane import CLOSED, DataPlane
from rollout_sched.integrations.gateway.data_plane.reply import Responses, error_headers
from rollout_sched.integrations.gateway.families import MetricsPage
from rollout_sched.integrations.gateway.options import Options, limits_of
from rollout_sched.integrations.http import ReceivedRequest, ServerLimits
from rollout_sched.integrations.http.server import HttpServer, Refusal
from rollout_sched.integrations.sglang import EngineInstance
from rollout_sched.link import FrontCalls
from rollout_sched.live.ports import InstanceError, OnTokens, Order, Output

log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------
# A front's own connections to the instances, opened when the front first needs them.

#: Seconds until an instance that did not describe itself is asked again: first wait, longest wait.
_AGAIN_S = (0.5, 30.0)


class FrontInstance(EngineInstance):
    """The scheduler decides whether the instance may serve; the front also asks what it offers."""

    unknown = "this front has not asked it yet what it offers"

    async def generate(self, order: Order, on_tokens: OnTokens | None = None) -> Output:
        if self.unknown:
            raise InstanceError(f"{self.name}, as seen by this front: {self.unknown}")
        return await super().generate(order, on_tokens)


class _Reached:
    """An instance, with the connections to it.

    holders   calls of `reach` minus calls of `leave`
    looked    set when the instance was asked for its description, whether it answered or not
    replaced  clients with an earlier key: requests sent over them may still be answered
    """

    def __init__(self, client: FrontInstance) -> None:
        self.client = client
        self.holders = 0
        self.looked = asyncio.Event()
        self.replaced: list[FrontInstance] = []
        self._look: asyncio.Task[None] | None = None

    def replace(self, client: FrontInstance) -> None:
        self.replaced.append(self.client)
        self.client = client

    def look(self) -> None:
        """Ask the instance for its description again, before more requests are sent to it."""
        if self._look is not None:
            self._look.cancel()
        if self.looked.is_set():  # otherwise a request may wait for the first description
            self.looked = asyncio.Event()
        self._look = asyncio.get_running_loop().create_task(_look_at(self.client, self.looked))

    async def close(self) -> None:
        if self._look is not None:
            self._look.cancel()
            await asyncio.gather(self._look, return_exceptions=True)
        self.looked.set()  # attempts that still wait then fail at the closed client
        for client in (*self.replaced, self.client):
            await client.close()


class FrontClients:
    """Clients by instance name, which is a URL (`link.remote_link.Clients`). Create it inside a
    running event loop.

    `make(url, key)` makes a client; with the key "" the front's own settings decide which key to
    send.
    """

    def __init__(self, make: Callable[[str, str], FrontInstance]) -> None:
        self._make = make
        self._here: dict[str, _Reached] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._here)

    def client(self, instance: str) -> FrontInstance:
        """Raises CallerError for a name that is not a URL."""
        if instance not in self._here:
            self._look_at(instance, "")
        return self._here[instance].client

    def reach(self, instance: str, key: str) -> None:
        """The instance has joined, perhaps as a different server than before: it is asked for its
        description before more requests are sent to it. Raises CallerError for a name that is not a
        URL."""
        self._look_at(instance, key)
        self._here[instance].holders += 1

    def leave(self, instance: str) -> None:
        """Call it once for each `reach`; the last call closes the connections to the instance."""
        reached = self._here.get(instance)
        if reached is None:
            return
        reached.holders -= 1
        if reached.holders <= 0:
            del self._here[instance]
            closing = asyncio.get_running_loop().create_task(reached.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def unverified(self, instance: str) -> asyncio.Event | None:
        """An event to wait for before sending, or None. It is set when the instance was asked for
        its description; if that failed, requests to it fail in `generate`."""
        looked = self._here[instance].looked
        return None if looked.is_set() else looked

    async def close(self) -> None:
        here, self._here = self._here, {}
        await asyncio.gather(*self._closing, *(reached.close() for reached in here.values()))

    def _look_at(self, instance: str, key: str) -> None:
        reached = self._here.get(instance)
        if reached is None:
            reached = self._here[instance] = _Reached(self._make(instance, key))
        elif key and key != reached.client.api_key:
            reached.replace(self._make(instance, key))
        reached.look()


async def _look_at(client: FrontInstance, looked: asyncio.Event) -> None:
    wait_s, max_s = _AGAIN_S
    while True:
        try:
            await client.describe()
        except (InstanceError, OSError) as error:
            client.unknown = str(error)
            log.warning("instance %s: %s", client.name, client.unknown)
        else:
            client.unknown = ""
        looked.set()
        if not client.unknown:
            return
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, max_s)


def front_metrics(calls: FrontCalls, data_plane: DataPlane) -> Iterator[Metric]:
    """The metrics of one front; the scheduler's process has the rest, under the same names where
    both have one."""
    yield from families.calls({"data": data_plane.calls.responses.by_status}, data_plane)
    yield families.gauge(
        "scheduler_connected", "Whether a scheduler is connected to this front.", calls.connected
    )
    yield families.counter(
        "schedulers",
        "Connections to a scheduler that this front has had so far.",
        calls.connections,
    )
    yield families.counter(
        "refused_orders",
        "Orders refused because they came from an epoch other than the connected scheduler's.",
        calls.refused,
    )


NO_SCHEDULER = "no scheduler has connected to this front yet; try again later"


class FrontService:
    """The data plane with its port. Create it inside a running event loop. Raises CallerError.

    The transport of the frames between this front and the scheduler's process connects `calls`, and
    sets `app.scheduler_url`. While no scheduler is connected, running requests continue and new
    requests wait.

    name         unique among the running fronts
    options      those of `rollout-sched serve` that are about clients and instances; the host is
                 that of the front
    shares_port  other processes listen at this port too, which is not 0
    on_broken    called with the error when the front cannot carry out an order: reconnect it
    """

    def __init__(
        self,
        name: str,
        options: Options,
        *,
        shares_port: bool = False,
        on_broken: Callable[[Exception], None] = lambda error: None,
        make_client: Callable[[str, str], FrontInstance] | None = None,
    ) -> None:
        self.name = name
        self.url = ""
        self._options = options
        self._shares_port = shares_port
        auth = read_access(options.api_key_file, options.trainer_key_file, options.admin_key_file)
        self._clients = FrontClients(make_client or _client_maker(options))
        # Random suffix: the scheduler may still know requests of an earlier start of this front.
        self.calls = FrontCalls(f"{name}-{secrets.token_hex(4)}", self._clients, on_broken)
        self.data_plane = DataPlane(
            self.calls,
            resumable=True,  # if not by this scheduler, then by the next one
            limits=limits_of(options),
            keys=auth.opening(Access.CLIENT),
            trainer_keys=auth.opening(Access.TRAINER),
            responses=Responses(logs=options.access_log),
        )
        self.app = FrontApp(self.calls, self.data_plane, has_port=not shares_port)
        limits = ServerLimits(max_body=options.max_body, max_bodies=options.max_bodies)
        self._server = HttpServer(self.app, None, limits)

    async def open(self) -> None:
        """Raises OSError."""
        host = self._options.host
        port, shared = self._options.port, self._shares_port
        listener = await self._server.listen(host, port, reuse_port=shared)
        port = listener.sockets[0].getsockname()[1]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def close(self) -> None:
        """Accept no new calls, let open calls finish during the grace period, then stop."""
        loop = asyncio.get_running_loop()
        last_words = loop.call_later(self._options.grace_s, partial(self.data_plane.refuse, CLOSED))
        try:
            await self._server.close(self._options.grace_s + 1.0)
        finally:
            last_words.cancel()
            await self.calls.close()
            await self._clients.close()


class FrontApp:
    """The HTTP app of a front (`integrations.http.server.App`): it answers clients' requests and
    its own /health, /liveness and /metrics, and redirects other paths to the gateway in the
    scheduler's process, whose base URL is `scheduler_url`; "" before it is known.

    has_port  no other front listens at its port; otherwise a scrape would reach any of them, and
              /metrics is redirected too
    leaving   /health says that it stops
    """

    def __init__(self, calls: FrontCalls, data_plane: DataPlane, *, has_port: bool = True) -> None:
        self._calls = calls
        self._data_plane = data_plane
        self.scheduler_url = ""
        self.leaving = False
        self._metrics = MetricsPage(partial(front_metrics, calls, data_plane))
        self._telling: set[asyncio.Task[None]] = set()
        self._own: dict[bytes, Callable[[ReceivedRequest], None]] = {
            b"/health": self._health,
            b"/liveness": self._liveness,
        }
        if has_port:
            self._own[b"/metrics"] = self._tell_metrics

    def wants(self, method: bytes, target: bytes) -> bool:
        return True

    def refusal(
        self, method: bytes, target: bytes, fields: Mapping[bytes, bytes]
    ) -> Refusal | None:
        if method == b"GET" and target.partition(b"?")[0] in self._own:
            return None
        if not self._data_plane.wants(method, target):
            return self._elsewhere(target, fields)
        refusal = self._data_plane.refusal(method, target, fields)
        if refusal is None and not self._calls.known:
            return self._not_yet()
        return refusal

    def handle(self, request: ReceivedRequest) -> None:
        own = None
        if request.method == b"GET":
            own = self._own.get(request.target.partition(b"?")[0])
        if own is None:
            self._data_plane.handle(request)
        else:
            own(request)

    def _elsewhere(self, target: bytes, fields: Mapping[bytes, bytes]) -> Refusal:
        if not self.scheduler_url:
            text = "this front answers clients' requests only; call the scheduler's process"
            return 404, [JSON], error_body(404, text)
        url = _as_reached(self.scheduler_url, fields.get(b"host", b""))
        text = f"the scheduler's process answers this path: {url}"
        return 307, [JSON, (b"location", url.encode() + target)], error_body(307, text)

    def _not_yet(self) -> Refusal:
        headers = [*error_headers(503, self._data_plane.calls.limits)]
        return 503, headers, error_body(503, NO_SCHEDULER)

    # -- of itself -------------------------------------------------------------------------

    def _health(self, request: ReceivedRequest) -> None:
        """200 if a request would be processed now."""
        calls = self._calls
        if self.leaving:
            request.answer(503, [JSON], error_body(503, CLOSED))
        elif not calls.connected:
            request.answer(503, [JSON], error_body(503, "no scheduler is connected"))
        elif not calls.max_model_len():
            request.answer(503, [JSON], error_body(503, "no instance has joined"))
        else:
            request.answer(200, [], b"")

    def _liveness(self, request: ReceivedRequest) -> None:
        request.answer(200, [], b"")

    def _tell_metrics(self, request: ReceivedRequest) -> None:
        telling = asyncio.get_running_loop().create_task(self._send_metrics(request))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def _send_metrics(self, request: ReceivedRequest) -> None:
        accept = request.fields.get(b"accept", b"").decode("latin-1")
        page, content_type = await self._metrics.text(accept)
        request.answer(200, [(b"content-type", content_type.encode())], page)


def _as_reached(url: str, host: bytes) -> str:
    """The URL; if its host stands for every address, with the one in the client's Host header."""
    parts = urlsplit(url)
    if parts.hostname not in ("0.0.0.0", "::"):
        return url
    try:
        here = urlsplit(f"//{host.decode('ascii')}").hostname or "localhost"
    except ValueError:  # not ASCII, or not a host
        here = "localhost"
    return f"http://[{here}]:{parts.port}" if ":" in here else f"http://{here}:{parts.port}"


def _client_maker(options: Options) -> Callable[[str, str], FrontInstance]:
    """The scheduler's process added these instances, so they are trusted as if this front were
    configured with them."""
    keys = read_instance_keys(options.instance_api_key_file, ())

    def make(url: str, key: str) -> FrontInstance:
        return FrontInstance(checked_url(url), api_key=key or keys.key_of(url) or keys.common)

    return make
