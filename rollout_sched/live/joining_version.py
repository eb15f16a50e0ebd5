"""Decides with which version an instance joins, from its own report and the trainer's version."""

from __future__ import annotations

import logging

from rollout_sched.live.ports import InstanceError

log = logging.getLogger(__name__)


class VersionRefused(InstanceError):
    """An instance must not serve with its current weights."""


class JoinsLater(InstanceError):
    """Nothing is wrong with the instance: it joins when what it waits for is available."""


class JoiningVersion:
    """The joining version of one instance, over its restarts.

    A version that the instance reports was set since it started, so it is trusted. An instance that
    reports none has its start weights. They are the trainer's first weights if the instance
    reported no version when it was first seen, or if the trainer started at version 0; otherwise
    they are unknown and must not serve.
    """

    def __init__(self, name: str, first: int) -> None:
        self._name = name
        self._first = first
        self._seen = False
        self._of_start: int | None = None  # the version of the weights it is started with

    def settle(self, told: int | None, newest: int, *, follows: bool, can_load: bool) -> int:
        """The version to join with. Raises VersionRefused if it is newer than the trainer's, and
        JoinsLater if it is older and nothing can load the newest.

        told      the version that it reports; None if it reports none
        newest    the trainer's version
        follows   a newer version becomes the trainer's version
        can_load  the newest version can be loaded before it serves
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
        # A trainer at version 0 has trained nothing: it has the instances' start weights.
        if told is None or self._first == 0:
            self._of_start = self._first
        if told is None:
            log.log(
                logging.WARNING if self._first else logging.INFO,
                "instance %s does not report the version of its weights: assuming %d, the "
                "trainer's version at its start; if that is wrong, label them "
                "(POST /update_weight_version) before it joins",
                self._name,
                self._first,
            )


def _newer(version: int, newest: int) -> str:
    return (
        f"it reports weights of version {version}, but the trainer is at {newest}: start with "
        f"--start-version {version} (in Python version={version}) to continue from there, or "
        f'with --start-version auto (version="auto") to use what the instances report; or load '
        f"version {newest} into it, or restart it"
    )


def _older(version: int | None, newest: int) -> str:
    has = "weights of unknown version" if version is None else f"version {version}"
    return (
        f"it has {has}, the trainer is at {newest}, and no way to load that is known: publish the "
        "weights with a way to load them (Reload, Transfer, or your own loader), or load them into "
        f"it: it joins when its /weight_info reports {newest}"
    )
