"""What `rollout-sched ray up` starts on a cluster, under which names, and where."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

#: Ray's namespace of all that is ours.
NAMESPACE = "rollout_sched"

#: The deployment that is meant where none is named.
NAME = "rollout"

#: Actors are started again for as long as there is a node for them.
FOR_EVER = -1

#: Clients' long polls and trainers' waits take no room from others.
CALLS_AT_ONCE = 10_000

FrontCount = Literal["per-node"] | Annotated[int, msgspec.Meta(ge=0)]


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """One scheduler and its fronts.

    name            of the deployment; there may be several on a cluster
    fronts          "per-node": one on each node, those that come later too; or how many, anywhere
    shared_store    the store is on a disk that every node has, so that the scheduler may go on at
                    another node when its own is gone
    scheduler_node  where it is, by the node's id; "": where it was started from
    scheduler_port  of its control plane; 0: any
    front_cpus      cores that Ray is to keep free for each front; 0: none
    servers         named actors that are vLLM servers, as a pattern: "vllm-*"; "" takes none
    serve_apps      Ray Serve applications whose replicas are vLLM servers, as a pattern of their
                    names, or of APPLICATION/DEPLOYMENT; "" takes none
    server_method   the method of actors and replicas that tells the URL, or (address, port)
    """

    name: str = NAME
    fronts: FrontCount = "per-node"
    shared_store: bool = False
    scheduler_node: str = ""
    scheduler_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    front_cpus: Annotated[float, msgspec.Meta(ge=0)] = 0
    servers: str = ""
    serve_apps: str = ""
    server_method: str = "url"

    @property
    def scheduler(self) -> str:
        """The name of its actor."""
        return f"{self.name}/scheduler"

    def front(self, place: str | int) -> str:
        """The name of a front's actor: by its node, or by number."""
        return f"{self.name}/front/{place}"


class PolicyText(msgspec.Struct, frozen=True):
    """A policy file as its author's machine has it, for a node that may not have it."""

    name: str
    text: str

    @classmethod
    def of(cls, policy: str) -> PolicyText | None:
        """None if that is a preset's name."""
        path = Path(policy)
        return cls(path.name, path.read_text("utf-8")) if path.is_file() else None

    def write(self, folder: Path) -> Path:
        path = folder / self.name
        path.write_text(self.text, "utf-8")
        return path


def scheduler_placement(deployment: Deployment, *, stored: bool) -> Any:
    """Where Ray may put the scheduler's actor: a store stays with its node, unless every node has
    it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = deployment.scheduler_node or ray.get_runtime_context().get_node_id()
    movable = deployment.shared_store or not stored
    return NodeAffinitySchedulingStrategy(node, soft=movable)
