"""Replicas of Ray Serve applications as servers, each with its own address.

Serve routes a request to an application to a replica of its choice, but the scheduler chooses the
replica itself, so it needs an address for each. There are two ways to get one: a method of the
replica's class returns it, as with a named actor, or Serve has opened a port for the replica
(`RAY_SERVE_ENABLE_DIRECT_INGRESS=1`; `ray.serve.llm` does so with direct streaming, and vLLM's own
API is behind the port).

Serve has no public call to a given replica. This module uses the actors of its controller and its
replicas, as Serve's proxies and handles do: Ray 2.60.
"""

from __future__ import annotations

import asyncio
import uuid
from pickle import dumps
from typing import Any

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.ray.named_servers import ActorName, Cluster

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
