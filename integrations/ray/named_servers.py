"""vLLM servers that the cluster knows by name: who appears joins, who is gone goes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from rollout_sched.core.errors import RolloutError

log = logging.getLogger(__name__)

#: Seconds between two looks at the cluster's names, and for a server to tell its URL: one that is
#: starting does not answer.
LOOK_S = 2.0
TELL_S = 5.0

#: Looks from one question to who is here already to the next: an actor that Ray has started again
#: has its name, and may have another address.
LOOKS_A_QUESTION = 15


class ActorName(NamedTuple):
    namespace: str
    name: str


class Cluster:
    """The part of Ray that this needs: its named actors.

    moves  whether one may tell another URL later
    """

    moves = True

    def names(self) -> list[ActorName]:
        """Of all, in all namespaces. Waits for Ray."""
        from ray.util import list_named_actors

        found = list_named_actors(all_namespaces=True)
        return [ActorName(actor["namespace"], actor["name"]) for actor in found]

    async def ask(self, actor: ActorName, method: str) -> Any:
        import ray

        handle = await asyncio.to_thread(ray.get_actor, actor.name, actor.namespace)
        return await getattr(handle, method).remote()


class NamedServers:
    """Keeps the instances what the actors of `cluster` are whose names fit `pattern`; `method` of
    each tells its URL, or (address, port). `add` and `remove` are told of URLs."""

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
        self._looks = 0
        self._following: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._following = asyncio.get_running_loop().create_task(self._follow_for_ever())

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    async def follow(self) -> None:
        """One look. Whoever cannot be taken in now is tried at the next."""
        names = await asyncio.to_thread(self._cluster.names)
        wanted = {name for name in names if fnmatchcase(name.name, self._pattern)}
        for actor in self._here.keys() - wanted:
            await self._told(actor, self._let_go(actor))
        asked = wanted - self._here.keys()
        self._looks += 1
        if self._cluster.moves and self._looks % LOOKS_A_QUESTION == 0:
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
        except Exception as error:  # whatever a server's own method raises
            why = str(error) if isinstance(error, RolloutError) else f"{type(error).__name__}"
            if self._said.get(actor) != why:
                log.warning("server %s of namespace %s: %s", actor.name, actor.namespace, why)
            self._said[actor] = why

    async def _follow_for_ever(self) -> None:
        while True:
            try:
                await self.follow()
            except Exception as error:  # Ray is busy, or away: the next look may find it
                log.warning("the cluster's names could not be read: %s", error)
            await asyncio.sleep(LOOK_S)


def url_of(told: Any) -> str:
    """A URL, from that or from (address, port). Raises ValueError."""
    if isinstance(told, str):
        return told.rstrip("/") if "://" in told else f"http://{told}"
    if isinstance(told, tuple | list) and len(told) == 2:
        address, port = told
        host = f"[{address}]" if ":" in str(address) else address
        return f"http://{host}:{port}"
    raise ValueError(f"a server tells its URL, or (address, port), not {told!r}")
