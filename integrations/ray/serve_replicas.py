"""Replicas of Ray Serve applications as servers, each by an address of its own.

Serve sends what comes to an application to a replica of its choice, so the application's route is
of no use to who decides on each request. A replica has an address of its own in one of two ways: a
method of its class tells one, as that of a named actor does, or Serve has opened a port for it
(`RAY_SERVE_ENABLE_DIRECT_INGRESS=1`, which `ray.serve.llm` has with direct streaming: vLLM's own
API is behind it).

Serve has no public call of a given replica. Used are its controller's and its replicas' actors, as
its proxies and handles do: Ray 2.60.
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

#: Seconds for the controller to answer; one that does not is asked again at the next look.
ANSWER_S = 30.0


class ServeReplicas(Cluster):
    """The running replicas, under the names APPLICATION/DEPLOYMENT/ID; one that is started again
    has another."""

    moves = False

    def __init__(self) -> None:
        self._actors: dict[ActorName, str] = {}
        self._ports: dict[str, str] = {}  # the URLs of those for which Serve opened one, by actor
        self._mute: set[ActorName] = set()  # they have no method that tells

    def names(self) -> list[ActorName]:
        import ray

        try:
            controller = ray.get_actor(CONTROLLER, NAMESPACE)
        except ValueError:  # Serve does not run, or not yet
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
        """What the replica tells, or else the URL that Serve gave it. Raises CallerError if there
        is neither."""
        name = self._actors[actor]
        if actor not in self._mute:
            from ray.serve.exceptions import RayServeException

            try:
                return await _call(name, method)
            except RayServeException:  # it has no such method: asked once, for Serve logs it
                self._mute.add(actor)
        if name not in self._ports:
            raise CallerError(
                f"it has no method {method!r}, and Serve opened no port for it alone. Give its "
                "class that method, or start Ray with RAY_SERVE_ENABLE_DIRECT_INGRESS=1; an "
                "application of one replica may be named by --instance and the URL of its route"
            )
        return self._ports[name]


def pattern_of(application: str) -> str:
    """Of the replicas' names, for a pattern of APPLICATION or APPLICATION/DEPLOYMENT."""
    return f"{application}/*"


def running(details: dict[str, Any]) -> dict[ActorName, str]:
    """The names of the actors of those that run, from Serve's details (its REST API's format)."""
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
    """URLs by the actors' names, from Serve's groups of targets. Proxies are among them, too."""
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
