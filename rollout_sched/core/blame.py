"""Whose fault a failed attempt was: the request's or the instance's.

One failure does not tell. The request is tried elsewhere, and what comes of that does: if it
succeeds there, the instance was at fault; if it goes on failing, the request was. Until then nobody
is punished for it but the request, which waits longer each time. So a request that makes every
server fail ("poison") costs nobody else anything, and an instance that fails now and then goes on
working.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollout_sched.core.model import Instance, Request

#: An instance rests when so many requests in a row have failed there and succeeded elsewhere.
FAULTS_TO_REST = 3


def suspect(request: Request, instance: Instance) -> None:
    """An attempt failed, and either may be at fault."""
    request.failures += 1
    if instance.id not in request.failed_on:
        request.failed_on += (instance.id,)
    instance.suspects.add(request.id)


def acquit(instance: Instance) -> None:
    """It has answered: what failed there before says nothing about it."""
    instance.faults = instance.rests = 0
    instance.suspects.clear()


def succeed(request: Request, instances: Mapping[str, Instance]) -> list[Instance]:
    """It got an answer, so where it failed the instance was at fault; returns who is to rest."""
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
    """It is over without an answer: it blames nobody."""
    for instance in _failed_on(request, instances):
        instance.suspects.discard(request.id)
    request.failed_on = ()


def _failed_on(request: Request, instances: Mapping[str, Instance]) -> list[Instance]:
    return [instances[name] for name in request.failed_on if name in instances]
