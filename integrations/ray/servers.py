"""Adds and removes vLLM servers as their named actors appear on and disappear from the cluster."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from fnmatch import fnmatchcase
from pickle import dumps
from typing import Any, NamedTuple

from rollout_sched.core.errors import CallerError, RolloutError

log = logging.getLogger(__name__)

#: Seconds between two reads of the cluster's actor names, and the timeout for a server to return
#: its URL: a starting server does not answer.
POLL_S = 2.0
TELL_S = 5.0

#: Known actors are asked for their URL again after so many reads: an actor that Ray has restarted
#: keeps its name, but may have another address.
POLLS_PER_QUESTION = 15


class ActorName(NamedTuple):
    namespace: str
    name: str


class Cluster:
    """Ray's named actors.

    moves  whether the URL of an actor may change
    """

    moves = True

    def names(self) -> list[ActorName]:
        """All named actors of all namespaces. Blocks until Ray answers."""
        from ray.util import list_named_actors

        found = list_named_actors(all_namespaces=True)
        return [ActorName(actor["namespace"], actor["name"]) for actor in found]

    async def ask(self, actor: ActorName, method: str) -> Any:
        import ray

        handle = await asyncio.to_thread(ray.get_actor, actor.name, actor.namespace)
        return await getattr(handle, method).remote()


class NamedServers:
    """Keeps the instances equal to the actors of `cluster` whose names match `pattern`. The method
    `method` of each actor returns its URL or (address, port). `add` and `remove` are called with
    the URL."""

    def __init__(
        self,
        pattern: str,
        method: str,
        add: Callable[[str], Awaitable[None]],
        remove: Callable[[str], Awaitable[None]],
        cluster: Cluster | None = None,
    ) -> None:
        self._pattern = pattern
        self._method = method
        self._add = add
        self._remove = remove
        self._cluster = cluster or Cluster()
        self._here: dict[ActorName, str] = {}
        self._said: dict[ActorName, str] = {}
        self._polls = 0
        self._following: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._following = asyncio.get_running_loop().create_task(self._follow_for_ever())

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    async def follow(self) -> None:
        """Read the names once. A server that cannot be added is tried again at the next read."""
        names = await asyncio.to_thread(self._cluster.names)
        wanted = {name for name in names if fnmatchcase(name.name, self._pattern)}
        for actor in self._here.keys() - wanted:
            await self._told(actor, self._let_go(actor))
        asked = wanted - self._here.keys()
        self._polls += 1
        if self._cluster.moves and self._polls % POLLS_PER_QUESTION == 0:
            asked = wanted
        await asyncio.gather(*(self._told(actor, self._take_in(actor)) for actor in asked))

    async def _take_in(self, actor: ActorName) -> None:
        async with asyncio.timeout(TELL_S):
            url = url_of(await self._cluster.ask(actor, self._method))
        if self._here.get(actor, url) != url:
            await self._let_go(actor)
        if actor in self._here:
            return
        await self._add(url)
        self._here[actor] = url
        log.info("server %s of namespace %s: %s", actor.name, actor.namespace, url)

    async def _let_go(self, actor: ActorName) -> None:
        await self._remove(self._here.pop(actor))

    async def _told(self, actor: ActorName, change: Awaitable[None]) -> None:
        try:
            await change
            self._said.pop(actor, None)
        except Exception as error:  # a server's own method may raise anything
            why = str(error) if isinstance(error, RolloutError) else f"{type(error).__name__}"
            if self._said.get(actor) != why:
                log.warning("server %s of namespace %s: %s", actor.name, actor.namespace, why)
            self._said[actor] = why

    async def _follow_for_ever(self) -> None:
        while True:
            try:
                await self.follow()
            except Exception as error:  # Ray is busy or unreachable: try again at the next read
                log.warning("cannot read the cluster's actor names: %s", error)
            await asyncio.sleep(POLL_S)


def url_of(told: Any) -> str:
    """The URL for a URL or an (address, port). Raises ValueError."""
    if isinstance(told, str):
        return told.rstrip("/") if "://" in told else f"http://{told}"
    if isinstance(told, tuple | list) and len(told) == 2:
        address, port = told
        host = f"[{address}]" if ":" in str(address) else address
        return f"http://{host}:{port}"
    raise ValueError(f"a server must return its URL or (address, port), not {told!r}")


# ------------------------------------------------------------------------------------------
# Replicas of Ray Serve applications as servers, each with its own address.
#
# Serve routes a request to an application to a replica of its choice, but the scheduler chooses the
# replica itself, so it needs an address for each. There are two ways to get one: a method of the
# replica's class returns it, as with a named actor, or Serve has opened a port for the replica
# (`RAY_SERVE_ENABLE_DIRECT_INGRESS=1`; `ray.serve.llm` does so with direct streaming, and vLLM's
# own API is behind the port).
#
# Serve has no public call to a given replica. This module uses the actors of its controller and its
# replicas, as Serve's proxies and handles do: Ray 2.60.

NAMESPACE = "serve"
CONTROLLER = "SERVE_CONTROLLER_ACTOR"

#: Timeout in seconds of a call to the controller; it is repeated at the next read.
ANSWER_S = 30.0


class ServeReplicas(Cluster):
    """The running replicas, under the names APPLICATION/DEPLOYMENT/ID; a restarted replica has
    another name."""

    moves = False

    def __init__(self) -> None:
        self._actors: dict[ActorName, str] = {}
        self._ports: dict[str, str] = {}  # URLs of the replicas with a port of Serve, by actor
        self._mute: set[ActorName] = set()  # replicas without the method

    def names(self) -> list[ActorName]:
        import ray

        try:
            controller = ray.get_actor(CONTROLLER, NAMESPACE)
        except ValueError:  # Serve is not running (yet)
            return []
        details, groups = ray.get(
            [
                controller.get_serve_instance_details.remote(),
                controller.get_target_groups.remote(from_proxy_manager=True),
            ],
            timeout=ANSWER_S,
        )
        self._actors = running(details)
        self._ports = ports(groups)
        self._mute &= self._actors.keys()
        return list(self._actors)

    async def ask(self, actor: ActorName, method: str) -> Any:
        """The answer of the replica's method, or else the URL that Serve gave it. Raises
        CallerError if there is neither."""
        name = self._actors[actor]
        if actor not in self._mute:
            from ray.serve.exceptions import RayServeException

            try:
                return await _call(name, method)
            except RayServeException:  # no such method; ask only once, because Serve logs each try
                self._mute.add(actor)
        if name not in self._ports:
            raise CallerError(
                f"the replica has no method {method!r}, and Serve opened no port for it. Add the "
                "method to its class, or start Ray with RAY_SERVE_ENABLE_DIRECT_INGRESS=1; for an "
                "application of one replica, pass the URL of its route with --instance"
            )
        return self._ports[name]


def pattern_of(application: str) -> str:
    """The pattern of replica names for a pattern of APPLICATION or APPLICATION/DEPLOYMENT."""
    return f"{application}/*"


def running(details: dict[str, Any]) -> dict[ActorName, str]:
    """The actor names of the running replicas, from Serve's details (format of its REST API)."""
    return {
        ActorName(NAMESPACE, f"{application}/{deployment}/{replica['replica_id']}"): replica[
            "actor_name"
        ]
        for application, its in details["applications"].items()
        for deployment, facts in its["deployments"].items()
        for replica in facts["replicas"]
        if replica["state"] == "RUNNING"
    }


def ports(groups: list[Any]) -> dict[str, str]:
    """URLs by actor name, from Serve's target groups. The proxies are included, too."""
    return {
        target.name: f"http://{target.ip}:{target.port}{group.route_prefix.rstrip('/')}"
        for group in groups
        if group.protocol == "HTTP"
        for target in group.targets
    }


async def _call(name: str, method: str) -> Any:
    import ray
    from ray.serve._private.common import RequestMetadata

    handle = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
    request = uuid.uuid4().hex
    metadata = RequestMetadata(request_id=request, internal_request_id=request, call_method=method)
    return await handle.handle_request.remote(dumps(metadata))
