"""Whether the request or the instance is at fault for a failed attempt.

One failure does not tell. The request is tried on another instance: if it succeeds there, the first
instance was at fault; if it keeps failing, the request is at fault. Until that is known, only the
request is penalised: it waits longer after each failure. So a request that makes every server fail
("poison") costs no other request and no instance anything, and an instance that fails now and then
keeps working.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollout_sched.core.model import Instance, Request

#: An instance rests when this many requests in a row failed there and succeeded elsewhere.
FAULTS_TO_REST = 3


def suspect(request: Request, instance: Instance) -> None:
    """An attempt failed, and the request or the instance may be at fault."""
    request.failures += 1
    if instance.id not in request.failed_on:
        request.failed_on += (instance.id,)
    instance.suspects.add(request.id)


def acquit(instance: Instance) -> None:
    """The instance has answered: its earlier failures no longer count."""
    instance.faults = instance.rests = 0
    instance.suspects.clear()


def succeed(request: Request, instances: Mapping[str, Instance]) -> list[Instance]:
    """The request got an answer, so the instances where it failed were at fault. Returns those that
    must rest."""
    at_fault = []
    for instance in _failed_on(request, instances):
        if request.id in instance.suspects:
            instance.suspects.remove(request.id)
            instance.faults += 1
            if instance.faults >= FAULTS_TO_REST:
                at_fault.append(instance)
    request.failures = 0
    request.failed_on = ()
    return at_fault


def forget(request: Request, instances: Mapping[str, Instance]) -> None:
    """The request ended without an answer: it blames no instance."""
    for instance in _failed_on(request, instances):
        instance.suspects.discard(request.id)
    request.failed_on = ()


def _failed_on(request: Request, instances: Mapping[str, Instance]) -> list[Instance]:
    return [instances[name] for name in request.failed_on if name in instances]
