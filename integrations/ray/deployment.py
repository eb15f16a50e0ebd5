"""What `rollout-sched ray up` starts on a cluster: options, names, placement, restarts."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from rollout_sched.core.model.records import Size
from rollout_sched.flags import Flag

log = logging.getLogger(__name__)

#: The Ray namespace of all our actors.
NAMESPACE = "rollout_sched"

#: The default name of a deployment.
NAME = "rollout"

#: Ray restarts our actors without a limit, as long as there is a node for them.
FOR_EVER = -1

#: Concurrent calls of an actor: so many that long polls of clients and waits of trainers do not
#: block other calls.
CALLS_AT_ONCE = 10_000

FrontCount = Literal["per-node"] | Size


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one scheduler and its fronts.

    name            of the deployment; a cluster may have several
    fronts          per-node: one on each node, including nodes that join later; or a number of
                    fronts, on any nodes
    shared_store    every node can open the folder --store, so the scheduler may restart on another
                    node when its own is lost
    scheduler_node  id of the scheduler's node; "": the node where it is started
    scheduler_port  port of its control plane; --port is the port of the fronts. 0: any
    front_cpus      cores that Ray reserves for each front; 0: none
    servers         pattern of named actors that are vLLM servers, such as 'vllm-*'; each joins when
                    it appears
    serve_apps      pattern of Ray Serve applications, or APPLICATION/DEPLOYMENT, whose replicas are
                    vLLM servers; each joins with its own address
    server_method   method of these actors and replicas that returns the URL or (address, port)
    """

    name: str = NAME
    fronts: Annotated[FrontCount, Flag(metavar="per-node|N")] = "per-node"
    shared_store: bool = False
    scheduler_node: str = ""
    scheduler_port: Annotated[int, msgspec.Meta(ge=0, le=65535), Flag(metavar="PORT")] = 0
    front_cpus: Annotated[float, msgspec.Meta(ge=0)] = 0
    servers: Annotated[str, Flag(metavar="PATTERN")] = ""
    serve_apps: Annotated[str, Flag(metavar="PATTERN")] = ""
    server_method: str = "url"

    @property
    def scheduler(self) -> str:
        """The name of the scheduler's actor."""
        return f"{self.name}/scheduler"

    def front(self, place: str | int) -> str:
        """The name of a front's actor, by node id or by number."""
        return f"{self.name}/front/{place}"


class PolicyText(msgspec.Struct, frozen=True):
    """The text of a policy file, for nodes that do not have the file."""

    name: str
    text: str

    @classmethod
    def read(cls, policy: str) -> PolicyText | None:
        """None if `policy` is the name of a preset."""
        path = Path(policy)
        return cls(path.name, path.read_text("utf-8")) if path.is_file() else None

    def write(self, folder: Path) -> Path:
        path = folder / self.name
        path.write_text(self.text, "utf-8")
        return path


def scheduler_placement(deployment: Deployment, *, stored: bool) -> Any:
    """Where Ray may place the scheduler's actor: on the node of its store, or, without a store or
    with a shared one, on any node if that node is lost."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = deployment.scheduler_node or ray.get_runtime_context().get_node_id()
    movable = deployment.shared_store or not stored
    return NodeAffinitySchedulingStrategy(node, soft=movable)


# ------------------------------------------------------------------------------------------
# Ends the process of an actor that could not start, so that Ray restarts it.

#: Seconds until the process ends; callers still get the error meanwhile.
AGAIN_S = 5.0


def end_if_failed(starting: asyncio.Task[Any], end: Callable[[int], Any] = os._exit) -> None:
    """End the process if `starting` fails. The cause may be temporary: a port that another process
    holds, a store whose disk is not mounted. Without a restart the actor would stay failed."""

    def look(starting: asyncio.Task[Any]) -> None:
        error = None if starting.cancelled() else starting.exception()
        if error is not None:
            log.critical("the actor could not start and is restarted: %s", error)
            starting.get_loop().call_later(AGAIN_S, end, 1)

    starting.add_done_callback(look)
