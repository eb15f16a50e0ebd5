"""With which version an instance joins: what it says itself, held against what the trainer has."""

from __future__ import annotations

import logging

from rollout_sched.live.ports import InstanceError

log = logging.getLogger(__name__)


class VersionRefused(InstanceError):
    """An instance must not serve with the weights that it has."""


class JoinsLater(InstanceError):
    """Nothing is wrong with an instance: it joins when what it waits for is there."""


class JoiningVersion:
    """Of one instance, over its restarts.

    A version that it says was given to it since it started, so it is believed. One that says none
    has the weights of its start: those are the trainer's first ones, if nobody had given it others
    when we first saw it; else nobody knows what they are, and they must not serve.
    """

    def __init__(self, name: str, first: int) -> None:
        self._name = name
        self._first = first
        self._seen = False
        self._of_start: int | None = None  # the version of the weights it is started with

    def settle(self, told: int | None, newest: int, *, follows: bool, can_load: bool) -> int:
        """The version to join with. Raises VersionRefused for a newer one than the trainer's, and
        JoinsLater for an older one that nobody can bring it up from.

        told      what it says it has; None if it says nothing
        newest    the trainer's
        follows   a newer one is the trainer's, too
        can_load  it can be brought to the newest before it serves
        """
        self._see(told)
        version = self._of_start if told is None else told
        if version is not None and version > newest and not follows:
            raise VersionRefused(_newer(version, newest))
        if version is not None and version >= newest:
            return version
        if can_load:
            return self._first if version is None else version
        raise JoinsLater(_older(version, newest))

    def _see(self, told: int | None) -> None:
        if self._seen:
            return
        self._seen = True
        # Whoever has trained nothing yet has the weights that the instances are started with.
        if told is None or self._first == 0:
            self._of_start = self._first
        if told is None:
            log.log(
                logging.WARNING if self._first else logging.INFO,
                "instance %s does not say which version its weights are: they are taken for %d, "
                "the trainer's when it started; if they are others, label them "
                "(POST /update_weight_version) before it joins",
                self._name,
                self._first,
            )


def _newer(version: int, newest: int) -> str:
    return (
        f"it says that its weights are version {version}, and the trainer is at {newest}: start "
        f"with --start-version {version} (in Python version={version}) to go on from there, or "
        f'with --start-version auto (version="auto") to take what the instances say; or load '
        f"version {newest} into it, or restart it"
    )


def _older(version: int | None, newest: int) -> str:
    has = "weights of which nobody knows the version" if version is None else f"version {version}"
    return (
        f"it has {has}, the trainer is at {newest}, and nobody has said how to load that: publish "
        "the weights with what loads them (Reload, Transfer, or a loader of your own), or load "
        f"them into it: it joins once its /weight_info says {newest}"
    )
