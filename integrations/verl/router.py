"""A router for verl's own LLM servers; `rollout.router_config_path` names a YAML file with

router_class: rollout_sched.integrations.verl.router.Router
policy: session_affinity.toml   # or a preset
slots: 256                      # rollout.max_num_seqs
kv_tokens: 400000               # of a server's KV cache
max_tokens: 8192                # rollout.response_length
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import ray

from rollout_sched.config import ConfigError, load_policy
from rollout_sched.integrations.verl.generate_call import sampling_of
from rollout_sched.integrations.verl.placement import Placement

#: Concurrent calls of the actor: calls that wait for a server must not block calls that release
#: one.
_OPEN_CALLS = 1_000_000

Count = Annotated[int, msgspec.Meta(ge=1)]


class RouterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The YAML file. `slots` and `kv_tokens` apply to each server; `max_tokens` is the limit of a
    response whose request gives none; `allow_code`: the policy may name classes of the user's own;
    verl reads `router_class`."""

    slots: Count
    kv_tokens: Count
    max_tokens: Count
    policy: str = "dplb"
    allow_code: bool = False
    seed: int = 0
    router_class: str = ""


class RequestRouter:
    """verl's RequestLoadBalancer (verl 0.9.1, `workers/rollout/router.py`) with our routing,
    ordering and admission: a request waits until the policy dispatches it to a server.

    verl updates the weights and all of its servers have the same ones, so versions are not used.
    """

    def __init__(self, servers: Mapping[str, Any], yaml_config: Mapping[str, Any]) -> None:
        """Raises ConfigError naming the key."""
        try:
            self._settings = msgspec.convert(dict(yaml_config), RouterSettings)
        except msgspec.ValidationError as error:
            raise ConfigError(f"rollout.router_config_path: {error}") from None
        policy = load_policy(self._settings.policy, allow_code=self._settings.allow_code)
        self._scheduler = policy.scheduler(1, seed=self._settings.seed)
        self._servers = dict(servers)
        self._made: Placement | None = None

    @property
    def _placement(self) -> Placement:
        """Created in the actor's event loop, which runs all methods but the constructor."""
        if self._made is None:
            settings = self._settings
            self._made = Placement(self._scheduler, settings.slots, settings.kv_tokens)
            self._made.add(self._servers)
        return self._made

    async def acquire_server(
        self,
        request_id: str,
        prompt_ids: Sequence[int] = (),
        sampling_params: Mapping[str, Any] | None = None,
    ) -> tuple[str, Any]:
        """(id, handle) of the server for this turn of `request_id`.

        Raises RuntimeError with verl's text if there are no servers; otherwise as
        `Placement.acquire`.
        """
        if not self._servers:
            raise RuntimeError("No available servers in load balancer")
        _, limit = sampling_of(sampling_params or {})
        server = await self._placement.acquire(
            request_id, len(prompt_ids), limit or self._settings.max_tokens
        )
        return server, self._servers[server]

    async def release_server(self, server_id: str, request_id: str | None = None) -> None:
        self._placement.release(server_id, request_id or "")

    async def require_acquire_fields(self) -> list[str]:
        return ["prompt_ids", "sampling_params"]

    async def require_release_fields(self) -> list[str]:
        return ["request_id"]

    async def add_servers(self, servers: Mapping[str, Any]) -> None:
        self._servers.update(servers)
        self._placement.add(servers)

    async def remove_servers(self, server_ids: Sequence[str]) -> None:
        self._placement.remove(server_ids)
        for server in server_ids:
            self._servers.pop(server, None)

    async def get_all_servers(self) -> list[str]:
        return list(self._servers)

    async def get_total_inflight(self) -> int:
        return sum(self._loads().values())

    async def get_status(self) -> dict[str, Any]:
        loads = self._loads()
        return {
            "servers": loads,
            "total_inflight": sum(loads.values()),
            "active_servers": len(loads),
        }

    async def clear_sticky_cache(self) -> dict[str, Any]:
        """Forget which server each session used last."""
        forgotten = self._placement.forget_sessions()
        return {"cleared_entries": forgotten, "server_loads": self._loads()}

    def _loads(self) -> dict[str, int]:
        return {server: self._placement.in_flight(server) for server in self._servers}


#: The class for verl to load: verl turns a plain class into an actor, but uses an actor class
#: as it is.
Router = ray.remote(max_concurrency=_OPEN_CALLS)(RequestRouter)
