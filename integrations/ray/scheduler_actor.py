"""The process of the scheduler: a gateway with all of its control plane, the fronts' hub."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import tempfile
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec

from rollout_sched import log_lines
from rollout_sched.integrations.gateway.control_plane.codec import MSGPACK
from rollout_sched.integrations.gateway.control_plane.gateway import NewInstance
from rollout_sched.integrations.gateway.control_plane.trainer_api import EPOCH, NextBatch
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.gateway.serve import Service
from rollout_sched.integrations.ray.deployment import Deployment, PolicyText
from rollout_sched.integrations.ray.failed_start import end_if_failed
from rollout_sched.integrations.ray.fronts import Fronts
from rollout_sched.integrations.ray.micro_batches import micro_batches
from rollout_sched.integrations.ray.named_servers import Cluster, NamedServers
from rollout_sched.integrations.ray.serve_replicas import ServeReplicas, pattern_of
from rollout_sched.link.dialler import SchedulerPlace
from rollout_sched.link.hub import Hub
from rollout_sched.link.listener import LinkListener
from rollout_sched.live.batch_delivery import NotYet
from rollout_sched.live.samples import Batch
from rollout_sched.store.errors import StoreInUse

log = logging.getLogger(__name__)

#: Seconds that the process of an earlier start may take to let go of the store: one whose node's
#: daemon was killed notices that after a while.
STORE_S = 60.0
STORE_LOOK_S = 0.2


class HandedBatch(msgspec.Struct, frozen=True):
    """What comes of asking for a batch. `batch` is without its samples, which are beside it; `uids`
    names their groups, and those that are lost."""

    epoch: str
    status: Literal["batch", "pending", "nothing"]
    batch: Batch | None = None
    uids: list[str] = []


class SchedulerFacts(msgspec.Struct, frozen=True):
    """url     of its control plane, on the node where it runs
    fronts  the URLs of those that answer, by name
    """

    url: str
    fronts: dict[str, str]


class SchedulerActor:
    """What Ray makes of it is `ray.remote(SchedulerActor)`; made anew, with the same arguments,
    whenever its process has died. It goes on from its store.

    `options`: as of `rollout-sched serve`, with the host and port that clients use, which are the
    fronts'. `policy`: what its policy file says, where that is one.
    """

    def __init__(
        self, options: Options, deployment: Deployment, policy: PolicyText | None = None
    ) -> None:
        log_lines.set_up(options.log_level, options.log_format)
        self._folder = tempfile.TemporaryDirectory(prefix="rollout-sched-")
        self._options = options
        self._deployment = deployment
        self._policy = policy
        self._service: Service
        self._http: aiohttp.ClientSession
        self._listener: LinkListener
        self._place: SchedulerPlace
        self._servers: list[NamedServers] = []
        arguments = (deployment.scheduler, options)
        self._fronts = Fronts(deployment, arguments, options.grace_s)
        self._starting = asyncio.get_running_loop().create_task(self._start())
        end_if_failed(self._starting)

    async def started(self) -> SchedulerFacts:
        """Raises CallerError, or what else keeps it from starting."""
        await self._starting
        return SchedulerFacts(self._service.url, await self._fronts.urls())

    async def place(self) -> tuple[SchedulerPlace, str]:
        """Where fronts connect to this start of it, and the URL of its control plane."""
        await self._starting
        return self._place, self._service.url

    async def call(self, method: str, path: str, data: bytes, epoch: str) -> tuple[int, bytes, str]:
        """A call of the control plane, as its administrator: (status, body, epoch)."""
        await self._starting
        headers = {EPOCH: epoch} if epoch else {}
        async with self._http.request(
            method, f"http://scheduler{path}", data=data, headers=headers
        ) as response:
            return response.status, await response.read(), response.headers.get(EPOCH, "")

    async def micro_batches(self, asked: NextBatch, epoch: str, count: int) -> tuple[Any, ...]:
        """(a `HandedBatch`, as msgpack, and so many micro-batches, None without a batch); each is
        an object of its own, which its caller owns. Raises CallerError, LeaseEnded."""
        await self._starting
        live = self._service.live
        now = live.driver.epoch
        if epoch and epoch != now:
            return _handed(HandedBatch(now, "pending"), count)
        try:
            batch = await live.trainer.next_batch(
                asked.ack,
                asked.timeout_s,
                trainer=asked.trainer,
                part=asked.part,
                parts=asked.parts,
            )
        except NotYet:
            return _handed(HandedBatch(now, "pending"), count)
        if batch is None:
            return _handed(HandedBatch(now, "nothing"), count)
        arrays = await asyncio.to_thread(micro_batches, batch, count)
        uids = [*batch.groups(), *(group.uid for group in batch.failed), *batch.filtered]
        head = HandedBatch(now, "batch", msgspec.structs.replace(batch, samples=[]), uids)
        return (msgspec.msgpack.encode(head), *arrays)

    async def close(self) -> None:
        """Let what runs finish for the grace period, then stop, fronts first."""
        with contextlib.suppress(Exception):
            await self._starting
        for servers in self._servers:
            await servers.close()
        await self._fronts.stop()
        if not self._starting.exception():
            self._listener.close()
            await self._http.close()
            await self._service.close()
        self._folder.cleanup()

    # -- starting --------------------------------------------------------------------------

    async def _start(self) -> None:
        import ray

        self._service = await self._made(ray.util.get_node_ip_address())
        address, key = self._service.options.host, secrets.token_urlsafe()
        self._listener = LinkListener(Hub(self._service.live), key)
        self._place = SchedulerPlace(address, await self._listener.open(address), key)
        await self._service.open()
        socket = aiohttp.UnixConnector(str(self._service.options.admin_socket), force_close=True)
        self._http = aiohttp.ClientSession(
            connector=socket,
            headers={"Accept": MSGPACK, "Content-Type": MSGPACK},
            timeout=aiohttp.ClientTimeout(total=None),
        )
        await self._fronts.open()
        if self._deployment.servers:
            self._follow(self._deployment.servers, Cluster())
        if self._deployment.serve_apps:
            self._follow(pattern_of(self._deployment.serve_apps), ServeReplicas())

    async def _made(self, address: str) -> Service:
        """Once the process of an earlier start has let go of the store. Raises CallerError."""
        folder = Path(self._folder.name)
        options = msgspec.structs.replace(
            self._options,
            policy=self._options.policy
            if self._policy is None
            else str(self._policy.write(folder)),
            host=address,
            port=self._deployment.scheduler_port,
            admin_socket=self._options.admin_socket or folder / "admin.sock",
        )
        patience = asyncio.get_running_loop().time() + STORE_S
        while True:
            try:
                return Service(options, log.info)
            except StoreInUse:
                if asyncio.get_running_loop().time() > patience:
                    raise
            await asyncio.sleep(STORE_LOOK_S)

    def _follow(self, pattern: str, cluster: Cluster) -> None:
        method = self._deployment.server_method
        servers = NamedServers(pattern, method, self._add, self._remove, cluster)
        servers.open()
        self._servers.append(servers)

    async def _add(self, url: str) -> None:
        if url not in self._service.live.driver.supervisors:  # by another name, or by hand
            await self._service.gateway.add(NewInstance(url, patient=True))

    async def _remove(self, url: str) -> None:
        await self._service.gateway.remove(url)


def _handed(head: HandedBatch, count: int) -> tuple[Any, ...]:
    return (msgspec.msgpack.encode(head), *[None] * count)
