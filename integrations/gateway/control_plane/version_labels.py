"""Finds the version of a trainer's weights: the one that it names, or else the next one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.gateway.control_plane.broadcast import to_each
from rollout_sched.integrations.gateway.control_plane.weight_protocol import Conflict
from rollout_sched.integrations.vllm.protocol.answers import version_of
from rollout_sched.live.asking import ask
from rollout_sched.live.driver import Driver
from rollout_sched.live.fleet_versions import THROUGH_US
from rollout_sched.live.instance_supervisor import InstanceSupervisor

log = logging.getLogger(__name__)


class VersionLabels:
    """Reads the version from a trainer's calls, labels instances with it, and publishes it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def told(self, body: bytes, field: str) -> int | None:
        """The version that a call names; None if it names none. Raises CallerError."""
        label = json_object(body).get(field)
        if label is None:
            return None
        version, newest = version_of(label), self._driver.view.run.version
        if version is None:
            raise CallerError(
                f'{field}: the label must be a version number, such as "{newest + 1}"; without a '
                "label the gateway counts versions itself"
            )
        if version < newest:
            raise Conflict(
                f"{field} is {version}, but version {newest} is published; versions must increase"
            )
        return version

    async def serve_anew(self, supervisors: Sequence[InstanceSupervisor], told: int | None) -> None:
        """All these instances have new weights."""
        version = self._driver.view.run.version + 1 if told is None else told

        async def label(supervisor: InstanceSupervisor) -> dict[str, Any]:
            limit_s = self._driver.settings.control_timeout_s
            async with supervisor.control_lock:
                await ask(supervisor.client.set_version(version), limit_s)
            return {}

        _, answer = await to_each(supervisors, label)
        unlabelled = {failure["url"] for failure in answer["failed"]}
        if unlabelled:  # for these the version is not recorded
            log.warning("version %d: %s cannot be labelled", version, ", ".join(sorted(unlabelled)))
        self.publish(version, [s for s in supervisors if s.name not in unlabelled])

    def publish(self, version: int, supervisors: Sequence[InstanceSupervisor]) -> None:
        for supervisor in supervisors:
            self._driver.versions.moved(supervisor.name, version, THROUGH_US)


def json_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object; an empty body is an empty object. Raises CallerError."""
    try:
        return msgspec.json.decode(body or b"{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CallerError("body: not a JSON object") from error
