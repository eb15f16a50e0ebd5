"""The message by which a trainer announces new weights, and the loaders made from it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import msgspec

from rollout_sched.core.model.errors import CallerError
from rollout_sched.integrations.gateway.control_plane.fanout import shipped
from rollout_sched.integrations.vllm import off_loop
from rollout_sched.integrations.vllm.protocol import endpoints
from rollout_sched.integrations.vllm.weights import (
    CHECK_LIMIT_S,
    ReloadFromDisk,
    WeightRoots,
    WeightTransfer,
)
from rollout_sched.live import Driver
from rollout_sched.live.ports import InstanceClient, InstanceError, WeightLoader
from rollout_sched.live.trainer import StoredWeights

# ------------------------------------------------------------------------------------------
# Checks paths to weights in the bodies of calls that are passed on to instances.
#
# Paths are found by the table that says where a call goes. Nothing else in a trainer's body is
# checked; but a caller that can have any file loaded can read it, a token at a time.

#: Beginnings of paths, for fields that are not known to be paths. Handles of GPU memory, which are
#: pickled and in base64, begin with "gA".
_BEGINNINGS = ("/", "~", "file:")


class NamedWeights:
    """Checks bodies against the allowed folders, if there are any."""

    def __init__(self, roots: WeightRoots) -> None:
        self.roots = roots

    async def check(self, method: str, path: str, body: bytes) -> None:
        """Raises CallerError for a body with a path outside of the allowed folders, or that is not
        JSON: an instance might parse it differently."""
        if not (self.roots.known and body):
            return
        try:
            told = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CallerError(f"body: {error}; with --weights-root it must be JSON") from error
        fields = shipped().path_fields(method, path, body)
        named = list(_paths(told, fields))
        try:
            await off_loop(partial(self._check_all, named), CHECK_LIMIT_S)
        except OSError as error:  # TimeoutError is one
            raise CallerError(f"weights {named}: {error or 'the disk does not answer'}") from error

    def _check_all(self, paths: list[str]) -> None:
        for path in paths:
            self.roots.check(path)


def _paths(told: Any, fields: frozenset[str], *, named: bool = False) -> Iterator[str]:
    """Strings in one of the `fields`, at any depth, and other strings that look like paths."""
    if isinstance(told, str):
        if named or told.startswith(_BEGINNINGS):
            yield told
    elif isinstance(told, dict):
        for field, value in told.items():
            yield from _paths(value, fields, named=named or field in fields)
    elif isinstance(told, list):
        for value in told:
            yield from _paths(value, fields, named=named)


#: Seconds between two polls of an instance whose weights the trainer loads itself.
LOOK_S = 1.0


class Reload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Load a checkpoint from disk; `{version}` in the path is replaced by the version.

    `visible_here`: the gateway's machine sees the path too, and checks it before any pause.
    """

    path: str
    visible_here: bool = True


class Transfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's weight transfer: the arguments of its backend for the set-up and for the update.

    A list as `update_info` makes one call per item. A `rank_offset` in `init_info` is that of the
    first instance; the others get the ranks that follow.
    """

    update_info: dict[str, Any] | list[dict[str, Any]]
    init_info: dict[str, Any] = {}


class WeightUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Version `version` is ready; exactly one of `reload`, `transfer` and `applied` says how an
    instance gets it.

    applied  the trainer has loaded it into every instance itself
    wait     answer only when every instance computes with it
    """

    version: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    reload: Reload | None = None
    transfer: Transfer | None = None
    applied: bool = False
    wait: bool = False

    def __post_init__(self) -> None:
        if (self.reload is not None) + (self.transfer is not None) + self.applied != 1:
            raise ValueError("give exactly one of reload, transfer and applied")


def stored(update: WeightUpdate) -> bytes:
    """The update as the store keeps it (`WeightLoaders.take_up`)."""
    return msgspec.json.encode(update)


class WeightLoaders:
    """Makes a loader from each update; `roots` are the folders in which weights on disk may lie,
    also for paths in the bodies of calls (`paths`)."""

    def __init__(self, driver: Driver, roots: WeightRoots | None = None) -> None:
        self.paths = NamedWeights(roots or WeightRoots())
        self._driver = driver
        self._init_info: dict[str, Any] | None = None
        self._transfer: WeightTransfer
        self._update_infos: dict[int, Any] = {}

    async def of(self, update: WeightUpdate) -> WeightLoader:
        """Raises CallerError if the version does not increase, or the weights are missing.

        Checking the weights takes time, and another update may come meanwhile: versions are ordered
        by their publication, not by this call.
        """
        version, newest = update.version, self._driver.view.run.version
        if not self._driver.versions.may_publish(version):
            raise CallerError(f"version {version} is not after {newest}; versions must increase")
        if update.transfer is not None:
            told = msgspec.json.encode(update.transfer)
            await self.paths.check("POST", endpoints.UPDATE_WEIGHTS, told)
        loader = self._loader(update)
        if isinstance(loader, ReloadFromDisk):
            await loader.check(version)
        return loader

    def take_up(self, stored: StoredWeights | None) -> None:
        """Load what an earlier run has published. If the trainer had loaded it itself, it is no
        longer known which instances have it: they are asked."""
        if stored is not None:
            update = msgspec.json.decode(stored.loader, type=WeightUpdate)
            self._driver.take_up_weights(self._loader(update))

    def _loader(self, update: WeightUpdate) -> WeightLoader:
        if update.reload is not None:
            path, visible_here = update.reload.path, update.reload.visible_here
            return ReloadFromDisk(path, visible_here=visible_here, roots=self.paths.roots)
        if update.transfer is not None:
            return self._of_transfer(update.transfer, update.version)
        return _Applied(self._driver)

    def _of_transfer(self, transfer: Transfer, version: int) -> WeightTransfer:
        """One object for all versions, because it knows which instances are already set up."""
        if self._init_info != transfer.init_info:
            self._init_info = transfer.init_info
            self._transfer = WeightTransfer(
                self._update_info, transfer.init_info, fleet=self._fleet
            )
        oldest = self._driver.view.run.fleet_version
        self._update_infos = {v: i for v, i in self._update_infos.items() if v >= oldest}
        self._update_infos[version] = transfer.update_info
        return self._transfer

    def _fleet(self) -> list[InstanceClient]:
        return [each.client for each in self._driver.supervisors.values() if each.joined]

    def _update_info(self, client: InstanceClient, version: int) -> Any:
        return self._update_infos[version]


class _Applied:
    """The trainer has loaded the version into the instances that have joined now.

    An instance that joins later, or was restarted, has other weights: the loader waits until the
    instance itself reports the version.
    """

    brings_weights = False

    def __init__(self, driver: Driver) -> None:
        self._loaded = {
            supervisor.name: supervisor.description.started_at
            for supervisor in driver.supervisors.values()
            if supervisor.description is not None and supervisor.joined
        }
        self._driver = driver

    async def __call__(self, client: InstanceClient, version: int) -> None:
        supervisor = self._driver.supervisors[client.name]
        description = supervisor.description
        assert description is not None  # it has joined
        if self._loaded.get(client.name) == description.started_at:
            return
        while supervisor.joined:
            told = (await client.describe()).version
            if told is not None and told >= version:
                return
            await asyncio.sleep(LOOK_S)
        raise InstanceError("it was lost before it had its weights")
