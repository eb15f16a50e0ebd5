"""Descriptions of new weights, as a trainer announces and a store keeps them, and their loaders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeGuard
from urllib.parse import urlsplit

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.records import Serial
from rollout_sched.integrations.vllm.weights import ReloadFromDisk, WeightRoots, WeightTransfer
from rollout_sched.live import Driver
from rollout_sched.live.ports import InstanceClient, InstanceError, WeightLoader
from rollout_sched.live.trainer import StoredWeights, WeightPublisher

#: Seconds between two polls of an instance whose weights the trainer loads itself.
POLL_S = 1.0


class Reload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Load a checkpoint from disk; `{version}` in the path is replaced by the version.

    `visible_here`: the gateway's machine sees the path too, and checks it before any pause.
    """

    path: str
    visible_here: bool = True


class Transfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's weight transfer: the arguments of its backend for the set-up and for the update.

    A list as `update_info` makes one call per item. A `rank_offset` in `init_info` is that of the
    first instance; the others get the ranks that follow. `draft_info` is the `update_info` of the
    model that drafts tokens; without it, that one stays as it is.
    """

    update_info: dict[str, Any] | list[dict[str, Any]]
    init_info: dict[str, Any] = {}
    draft_info: dict[str, Any] | list[dict[str, Any]] | None = None


class Applied(msgspec.Struct, frozen=True):
    """The trainer itself has loaded the weights into every instance."""


#: Some instances get the weights in one way and some in another: node-local memory here, a disk
#: there. By a pattern, such as "node0" or "*", for an instance's host, host:port or name, or for a
#: value of its labels in the endpoints file; the first that fits counts.
ByLabel = Mapping[str, Reload | Transfer]

#: How an instance gets new weights: by description, or (in process) by a coroutine function
#: `apply(client, version)`.
Apply = Reload | Transfer | ByLabel | Applied | WeightLoader


def is_coroutine(apply: Apply) -> TypeGuard[WeightLoader]:
    return not isinstance(apply, Reload | Transfer | Mapping | Applied)


class Way(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Exactly one of `reload` and `transfer`."""

    reload: Reload | None = None
    transfer: Transfer | None = None

    def __post_init__(self) -> None:
        if (self.reload is None) == (self.transfer is None):
            raise ValueError("give exactly one of reload and transfer")


class WeightUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Version `version` is ready; exactly one of `reload`, `transfer`, `by_label` and `applied`
    says how an instance gets it.

    by_label  as in `ByLabel`
    applied   the trainer has loaded it into every instance itself
    wait      answer only when every instance computes with it
    """

    version: Serial
    reload: Reload | None = None
    transfer: Transfer | None = None
    by_label: dict[str, Way] = {}
    applied: bool = False
    wait: bool = False

    def __post_init__(self) -> None:
        described = (self.reload is not None) + (self.transfer is not None)
        if described + bool(self.by_label) + self.applied != 1:
            raise ValueError("give exactly one of reload, transfer, by_label and applied")


def update_of(version: int, apply: Apply) -> WeightUpdate:
    """The message to the gateway for a description."""
    if isinstance(apply, Reload):
        return WeightUpdate(version, reload=apply)
    if isinstance(apply, Transfer):
        return WeightUpdate(version, transfer=apply)
    if isinstance(apply, Mapping):
        ways = {
            label: Way(reload=one) if isinstance(one, Reload) else Way(transfer=one)
            for label, one in apply.items()
        }
        return WeightUpdate(version, by_label=ways)
    return WeightUpdate(version, applied=True)


def _stored(update: WeightUpdate) -> bytes:
    """The update as the store keeps it (`WeightLoaders.restore`)."""
    return msgspec.json.encode(msgspec.structs.replace(update, wait=False))


class WeightLoaders:
    """Makes a loader from each update; `roots` are the folders in which weights on disk may lie."""

    def __init__(self, driver: Driver, roots: WeightRoots | None = None) -> None:
        self._roots = roots or WeightRoots()
        self._driver = driver
        self._transfers: dict[str, _Transfers] = {}  # by label

    async def publish(
        self, update: WeightUpdate, publisher: WeightPublisher, *, wait: bool
    ) -> None:
        """Raises CallerError as `loader_for` does, but the newest update may be published again."""
        version, told = update.version, _stored(update)
        loader = publisher.known(version, told) or await self.loader_for(update)
        await publisher.publish(version, loader, told, wait=wait)

    async def loader_for(self, update: WeightUpdate) -> WeightLoader:
        """Raises CallerError if the version does not increase, or the weights are missing.

        Checking the weights takes time, and another update may come meanwhile: versions are ordered
        by their publication, not by this call.
        """
        version, newest = update.version, self._driver.view.run.version
        if not self._driver.versions.may_publish(version):
            raise CallerError(f"version {version} is not after {newest}; versions must increase")
        loader = self._loader(update)
        loaders = [loader]
        if isinstance(loader, _ByLabel):
            for client in self._fleet():
                loader.of(client)
            loaders = list(loader.loaders.values())
        for one in loaders:
            if isinstance(one, ReloadFromDisk):
                await one.check(version)
        return loader

    def restore(self, stored: StoredWeights | None) -> None:
        """Load what an earlier run has published. If the trainer had loaded it itself, it is no
        longer known which instances have it: they are asked."""
        if stored is not None:
            update = msgspec.json.decode(stored.loader, type=WeightUpdate)
            self._driver.restore_weights(self._loader(update))

    def _loader(self, update: WeightUpdate) -> WeightLoader:
        if update.applied:
            return _LoadedByTrainer(self._driver)
        if not update.by_label:
            return self._of_way(update, update.version)
        loaders: dict[str, WeightLoader] = {}
        by_label = _ByLabel(loaders)
        for label, way in update.by_label.items():
            loaders[label] = self._of_way(way, update.version, label, by_label.label_of)
        return by_label

    def _of_way(
        self,
        way: Way | WeightUpdate,
        version: int,
        label: str = "",
        label_of: Callable[[InstanceClient], str] = lambda client: "",
    ) -> WeightLoader:
        if way.reload is not None:
            path, visible_here = way.reload.path, way.reload.visible_here
            return ReloadFromDisk(path, visible_here=visible_here, roots=self._roots)
        assert way.transfer is not None  # see __post_init__
        transfers = self._transfers.setdefault(label, _Transfers())
        transfers.forget(self._driver.view.run.fleet_version)
        return transfers.add(
            way.transfer, version, lambda: [one for one in self._fleet() if label_of(one) == label]
        )

    def _fleet(self) -> list[InstanceClient]:
        return [each.client for each in self._driver.supervisors.values() if each.joined]


class _Transfers:
    """The transfers of all versions to the instances of one label: one object, because it knows
    which instances are already set up."""

    def __init__(self) -> None:
        self._init_info: dict[str, Any] | None = None
        self._loader: WeightTransfer
        self._by_version: dict[int, Transfer] = {}

    def forget(self, oldest: int) -> None:
        """No instance will load a version before this one."""
        for old in [known for known in self._by_version if known < oldest]:
            del self._by_version[old]

    def add(
        self, transfer: Transfer, version: int, fleet: Callable[[], list[InstanceClient]]
    ) -> WeightTransfer:
        if self._init_info != transfer.init_info:
            self._init_info = transfer.init_info
            self._loader = WeightTransfer(
                lambda version: self._by_version[version].update_info,
                transfer.init_info,
                fleet,
                lambda version: self._by_version[version].draft_info,
            )
        self._by_version[version] = transfer
        return self._loader


class _ByLabel:
    """The loader of each instance by the first label that fits it."""

    def __init__(self, loaders: Mapping[str, WeightLoader]) -> None:
        self.loaders = loaders

    def label_of(self, client: InstanceClient) -> str:
        """Raises CallerError if none fits."""
        url = urlsplit(client.name)
        labels = getattr(client, "labels", ())
        names = (client.name, url.netloc, url.hostname or "", *labels)
        for label in self.loaders:
            if any(fnmatchcase(name, label) for name in names):
                return label
        raise CallerError(
            f"no loader of {', '.join(self.loaders)} is for instance {client.name} with labels "
            f"{', '.join(labels) or 'none'}: add one for it, or for '*'"
        )

    def of(self, client: InstanceClient) -> WeightLoader:
        """Raises CallerError if there is none."""
        return self.loaders[self.label_of(client)]

    async def __call__(self, client: InstanceClient, version: int) -> None:
        await self.of(client)(client, version)


class _LoadedByTrainer:
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
            await asyncio.sleep(POLL_S)
        raise InstanceError("it was lost before it had its weights")
