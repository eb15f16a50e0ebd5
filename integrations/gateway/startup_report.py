"""The lines that a gateway prints at start and when an instance joins: one line for each thing that
the operator may want to change."""

from __future__ import annotations

from collections.abc import Iterator

from rollout_sched import __version__
from rollout_sched.config import PolicyFile
from rollout_sched.core import scheduler
from rollout_sched.integrations.gateway.control_plane.auth import (
    Access,
    AccessControl,
    is_loopback,
)
from rollout_sched.integrations.gateway.control_plane.gateway import notes_of
from rollout_sched.live.instance_supervisor import InstanceSupervisor


def startup_report(
    policy: PolicyFile, auth: AccessControl, host: str, *, keeps_sessions: bool
) -> Iterator[str]:
    """`keeps_sessions`: whether session names have an effect."""
    roles = ", ".join(f"{role} {cls.__name__}" for role, (cls, _) in policy.roles.items())
    build = "" if scheduler.__file__.endswith(".py") else ", compiled"
    yield f"rollout-sched {__version__}{build}: policy {policy.name} ({roles})"
    if not auth.takes_keys(Access.CLIENT) and not is_loopback(host):
        yield f"any client that can reach {host} may use this gateway; --api-key-file closes it"
    if not keeps_sessions:
        yield "X-Session-ID is ignored: the policy's [affinity] is none"
    if auth.is_open:
        yield "/admin and the trainer's API are open to programs on this machine only"
    if auth.shuts_admins_out:
        yield "/admin is closed; --admin-key-file or --admin-socket opens it"


def described(supervisor: InstanceSupervisor) -> list[str]:
    """Lines about an instance that has joined: its properties, and features that it lacks."""
    told = supervisor.description
    assert told is not None  # it has joined
    offers = ", ".join(sorted(told.capabilities)) or "nothing beyond generation"
    line = (
        f"instance {supervisor.name}: {told.model or 'a model'}, {told.slots} slots, "
        f"{told.kv_tokens} KV tokens, up to {told.max_model_len} tokens a request; offers {offers}"
    )
    return [line, *(f"  {note}" for note in notes_of(supervisor))]
