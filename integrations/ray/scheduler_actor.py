"""The scheduler as a Ray actor: a gateway with its whole control plane, and the fronts' hub."""

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

from rollout_sched import process as log_lines
from rollout_sched.client.remote import EPOCH, MSGPACK, NextBatch
from rollout_sched.integrations.gateway.control_plane import NewInstance
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.gateway.serve import Service
from rollout_sched.integrations.ray.deployment import Deployment, PolicyText, end_if_failed
from rollout_sched.integrations.ray.fronts import Fronts
from rollout_sched.integrations.ray.servers import Cluster, NamedServers, ServeReplicas, pattern_of
from rollout_sched.integrations.token_columns import micro_batches
from rollout_sched.link import Hub, LinkListener, SchedulerPlace
from rollout_sched.live.trainer import NotReady
from rollout_sched.live.trainer.samples import Batch
from rollout_sched.store import StoreInUse

log = logging.getLogger(__name__)

#: Seconds that an earlier process may take to release the store: a process notices late that its
#: node's daemon was killed.
STORE_S = 60.0
STORE_POLL_S = 0.2


class HandedBatch(msgspec.Struct, frozen=True):
    """The answer to a request for a batch. `batch` has no samples: they travel beside it. `uids`
    has their groups, and the failed and filtered groups."""

    epoch: str
    status: Literal["batch", "pending", "nothing"]
    batch: Batch | None = None
    uids: list[str] = []


class SchedulerFacts(msgspec.Struct, frozen=True):
    """url     URL of its control plane, on the node where it runs
    fronts  URLs of the fronts that answer, by name
    """

    url: str
    fronts: dict[str, str]


class SchedulerActor:
    """Started as `ray.remote(SchedulerActor)`; Ray restarts it with the same arguments when its
    process dies. It then continues from its store.

    `options`: those of `rollout-sched serve`; host and port are those that clients use, so those of
    the fronts. `policy`: the text of the policy file, unless the policy is a preset.
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
        """Raises CallerError, or any other error of the start."""
        await self._starting
        return SchedulerFacts(self._service.url, await self._fronts.urls())

    async def place(self) -> tuple[SchedulerPlace, str]:
        """Where fronts connect to this process, and the URL of its control plane."""
        await self._starting
        return self._place, self._service.url

    async def call(self, method: str, path: str, data: bytes, epoch: str) -> tuple[int, bytes, str]:
        """A call to the control plane with administrator rights: (status, body, epoch)."""
        await self._starting
        headers = {EPOCH: epoch} if epoch else {}
        async with self._http.request(
            method, f"http://scheduler{path}", data=data, headers=headers
        ) as response:
            return response.status, await response.read(), response.headers.get(EPOCH, "")

    async def micro_batches(self, asked: NextBatch, epoch: str, count: int) -> tuple[Any, ...]:
        """A `HandedBatch` as msgpack, then `count` micro-batches, each None if there is no batch.
        Each is a separate object, which the caller owns. Raises CallerError, LeaseEnded."""
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
        except NotReady:
            return _handed(HandedBatch(now, "pending"), count)
        if batch is None:
            return _handed(HandedBatch(now, "nothing"), count)
        arrays = await asyncio.to_thread(micro_batches, batch, count)
        uids = [*batch.groups(), *(group.uid for group in batch.failed), *batch.filtered]
        head = HandedBatch(now, "batch", msgspec.structs.replace(batch, samples=[]), uids)
        return (msgspec.msgpack.encode(head), *arrays)

    async def close(self) -> None:
        """Let running requests finish within the grace period, then stop, fronts first."""
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
        """The service, once the process of an earlier start has released the store. Raises
        CallerError."""
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
            await asyncio.sleep(STORE_POLL_S)

    def _follow(self, pattern: str, cluster: Cluster) -> None:
        method = self._deployment.server_method
        servers = NamedServers(pattern, method, self._add, self._remove, cluster)
        servers.open()
        self._servers.append(servers)

    async def _add(self, url: str) -> None:
        if url not in self._service.live.driver.supervisors:  # added by hand or by another actor
            await self._service.gateway.add(NewInstance(url, patient=True))

    async def _remove(self, url: str) -> None:
        await self._service.gateway.remove(url)


def _handed(head: HandedBatch, count: int) -> tuple[Any, ...]:
    return (msgspec.msgpack.encode(head), *[None] * count)
