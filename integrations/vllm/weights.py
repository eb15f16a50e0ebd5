"""Weight loaders, which bring new weights into a vLLM instance.

A loader only changes weights. Before, the driver closes the gate and pauses the instance;
afterwards it labels the instance, resumes it and opens the gate. Any exception of a loader makes
the instance unfit: after a failed load vLLM's model is incomplete, and the next request kills the
engine.

A user's own loader is any `async def apply(client, version)`.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import parse_qsl
from weakref import WeakKeyDictionary

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.vllm.checkpoint import check_checkpoint
from rollout_sched.integrations.vllm.protocol import endpoints
from rollout_sched.live.ports import InstanceClient, InstanceError
from rollout_sched.process import off_loop

# ------------------------------------------------------------------------------------------
# Assigns the ranks of a weight-transfer group to the workers of each server.
#
# A trainer that sees one server sends it the first of its ranks and the size of the group: in vLLM
# 0.32 `rank_offset` and `world_size` of the NCCL backends
# (`distributed/weight_transfer/nccl_common.py`), where a worker's rank is the offset plus its own.
# With the same values, every server of a fleet would take the same ranks, and NCCL would wait
# forever for the others. So each server gets its own ranks, in order.

#: The largest rank number that is accepted.
MAX_RANKS = 2**20


class RankFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a call that give a server's ranks.

    within  the field that contains the other two; "" if they are at the top level
    first   the field of the first rank: all below it are the trainer's, or not counted
    world   the field of the size of the group, as far as it is counted
    """

    first: str
    world: str
    within: str = ""


#: The fields of vLLM's own init_info.
VLLM = RankFields("rank_offset", "world_size")


def deal(
    info: Mapping[str, Any], fields: RankFields, world_sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """`info` for each server, with its own first rank and the size of the group; `world_sizes` has
    the number of workers of each server. Unchanged if it has no rank, as for backends without.

    Raises CallerError if `info` gives another group size: the group would wait for ranks that never
    come, or have some twice.
    """
    if fields.within:
        inner = info.get(fields.within)
        if not isinstance(inner, Mapping):
            return [dict(info)] * len(world_sizes)
        flat = RankFields(fields.first, fields.world)
        return [{**info, fields.within: dealt} for dealt in deal(inner, flat, world_sizes)]
    if fields.first not in info:
        return [dict(info)] * len(world_sizes)
    first = _number(fields.first, info[fields.first])
    world = first + sum(world_sizes)
    told = info.get(fields.world)
    if told is not None and _number(fields.world, told) != world:
        raise CallerError(
            f"{fields.world} is {told} with {fields.first} {first}, but the present instances have "
            f"{sum(world_sizes)} ranks, so it must be {world}: call GET /get_world_size just "
            "before you set up the group"
        )
    dealt = []
    for size in world_sizes:
        dealt.append({**info, fields.first: first, fields.world: world})
        first += size
    return dealt


def _number(field: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_RANKS:
        raise CallerError(f"{field} must be a number from 0 to {MAX_RANKS}")
    return value


# ------------------------------------------------------------------------------------------
# Folders in which weights on disk must lie, so that a trainer cannot have arbitrary files read: a
# caller that can have any file loaded can read it, a token at a time.
#
# Fields of a call that are paths are known by their names, whatever the call is.


#: Seconds for which the disk may take to answer.
CHECK_LIMIT_S = 60.0

#: The last word of a field that names a file: weights_path, sync_dir, modelPath, uris.
_PATH_FIELD = re.compile(
    r"(?:^|[\W_]|(?<=[a-z])(?=[A-Z]))(?i:path|dir|directory|folder|file|checkpoint|ckpt|uri)s?$"
)

#: Any other string that is a path. Handles of GPU memory, which are pickled and in base64, begin
#: with "gA".
_PATH = re.compile(r"\s*(?:[/~]|\.{1,2}[/\\]|file:)|(?:.*[/\\])?\.\.(?:[/\\]|$)", re.I | re.S)


class OutsideRoots(CallerError):
    """The path lies in no folder that --weights-root gives."""


class WeightRoots:
    """The allowed folders; if there are none, every folder is allowed.

    Symbolic links are resolved as far as this machine sees the path, `..` always. A resolved path
    begins with its folder as it was given: instances may know only that name.
    """

    def __init__(self, roots: Iterable[Path] = ()) -> None:
        self._roots = {Path(os.path.realpath(root)): Path(os.path.abspath(root)) for root in roots}

    @property
    def known(self) -> bool:
        """Whether there are any."""
        return bool(self._roots)

    def resolve(self, path: str | Path) -> Path:
        """The path that an instance is sent. Raises OutsideRoots if it, or an entry of it that this
        machine sees, lies outside the roots. Reads the disk, which may block: do not call it on an
        event loop."""
        resolved = self._resolve(path)
        if self._roots and resolved.is_dir():
            for entry in resolved.iterdir():
                self._resolve(entry)
        return resolved

    def _resolve(self, path: str | Path) -> Path:
        if not self._roots:
            return Path(path)
        if not os.path.isabs(path):
            raise self._outside(path, "it is not an absolute path")
        try:
            real = Path(os.path.realpath(path))
        except ValueError as error:  # a null byte
            raise self._outside(path, str(error)) from error
        for root, given in self._roots.items():
            if real.is_relative_to(root):
                return given / real.relative_to(root)
        raise self._outside(path, "" if str(real) == str(path) else f"it leads to {real}")

    async def resolve_call(
        self, query: str, body: bytes, fields: frozenset[str] = frozenset()
    ) -> bytes:
        """The body of a call with resolved paths, if there are any folders. Raises CallerError for
        a path outside of them or in the query, and for a body that is not JSON: an instance might
        parse it differently. `fields`: more names of fields with paths, at any depth."""
        if not self._roots:
            return body
        try:
            return await off_loop(partial(self._resolve_call, query, body, fields), CHECK_LIMIT_S)
        except OSError as error:  # TimeoutError is one
            raise CallerError(f"weights: {error or 'the disk does not answer'}") from error

    def _resolve_call(self, query: str, body: bytes, fields: frozenset[str]) -> bytes:
        for name, value in parse_qsl(query):
            if _PATH_FIELD.search(name) or _PATH.match(value):
                raise self._outside(value, f"{name!r} in the query; give it in the body")
        if not body:
            return body
        try:
            told = msgspec.json.decode(body)
            return msgspec.json.encode(self._resolve_value(told, fields))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CallerError(f"body: {error}; with --weights-root it must be JSON") from error

    def _resolve_value(self, told: Any, fields: frozenset[str], *, named: bool = False) -> Any:
        """`named`: it is in a field whose name says that it is a path."""
        if isinstance(told, str):
            return str(self.resolve(told)) if named or _PATH.match(told) else told
        if isinstance(told, list):
            return [self._resolve_value(value, fields, named=named) for value in told]
        if isinstance(told, dict):
            resolved = {}
            for field, value in told.items():
                known = named or field in fields or _PATH_FIELD.search(field) is not None
                resolved[self._resolve_value(field, fields)] = self._resolve_value(
                    value, fields, named=known
                )
            return resolved
        return told

    def _outside(self, path: str | Path, why: str) -> OutsideRoots:
        roots = ", ".join(map(str, self._roots.values()))
        return OutsideRoots(
            f"weights {str(path)!r} lie outside of {roots}{why and f': {why}'}; move them there, "
            "or start the gateway with a --weights-root that contains them"
        )


LOAD_LIMIT_S = 900.0

#: Seconds for which a checkpoint that was found complete is not checked again, so that an update is
#: checked once for all instances; for an instance that joins later it is checked again.
GOOD_FOR_S = 60.0


class WeightClient(Protocol):
    """What weight loaders need from a client beyond the driver's port; HttpInstance and
    InProcessInstance have it."""

    @property
    def started_at(self) -> float: ...

    async def collective_rpc(
        self, method: str, kwargs: Mapping[str, Any], limit_s: float | None = None
    ) -> None: ...

    async def weight_transfer(
        self, step: str, body: Mapping[str, Any], limit_s: float | None = None
    ) -> None: ...

    async def world_size(self) -> int: ...


class ReloadFromDisk:
    """Every instance loads a checkpoint from disk (vLLM's `reload_weights`).

    path           a folder from which vLLM can load a model, with `{version}` in place of the
                   version, or a function of the version
    visible_here   whether this machine sees it too: then it is checked before any instance is
                   changed
    roots          folders in which it must lie; the instances are sent its resolved path. None
                   for any
    """

    def __init__(
        self,
        path: str | Path | Callable[[int], str | Path],
        *,
        visible_here: bool = True,
        roots: WeightRoots | None = None,
    ) -> None:
        self._path = path
        self._roots = roots or WeightRoots()
        self._visible_here = visible_here
        self._checked = (-1, 0.0, Path())  # (version, time, resolved path) of the last good one

    def path(self, version: int) -> Path:
        """The path of a version's weights. Raises CallerError if the template is not valid."""
        if callable(self._path):
            return Path(self._path(version))
        parts = str(self._path).split("{version}")
        if any(brace in part for part in parts for brace in "{}"):
            raise CallerError(f"path {str(self._path)!r}: only {{version}} is allowed in braces")
        return Path(str(version).join(parts))

    async def check(self, version: int) -> Path:
        """The path for the instances. Raises CallerError if there is no complete checkpoint. Call
        it before any pause."""
        folder = self.path(version)
        if not (self._visible_here or self._roots.known):
            return folder
        try:
            resolved = await off_loop(partial(self._resolve, folder), CHECK_LIMIT_S)
        except OSError as error:  # TimeoutError is one
            reason = str(error) or f"not checked within {CHECK_LIMIT_S:g} s"
            raise CallerError(
                f"weights {folder}: {reason}; does the disk answer? If only the instances see "
                "it, set visible_here to false"
            ) from error
        self._checked = (version, time.monotonic(), resolved)
        return resolved

    def _resolve(self, folder: Path) -> Path:
        resolved = self._roots.resolve(folder)
        if self._visible_here:
            check_checkpoint(resolved)
        return resolved

    async def __call__(self, client: InstanceClient, version: int) -> None:
        checked, when, folder = self._checked
        if checked != version or time.monotonic() - when > GOOD_FOR_S:
            folder = await self.check(version)
        kwargs = {"weights_path": str(folder)}
        await _workers(client).collective_rpc("reload_weights", kwargs, LOAD_LIMIT_S)


class WeightTransfer:
    """vLLM's weight transfer: init once per instance, then start, update, finish.

    `init_info` and the `update_info` of a version are the arguments of the backend of
    `--weight-transfer-config`. If an update info is a list of mappings, one update call is made for
    each, such as one per bucket. `draft_info`: the same for the model that drafts tokens, which is
    updated after the other; None for a version that leaves it as it is.

    `fleet`: the instances that form a group of ranks, if `init_info` has a `rank_offset`: each then
    gets its own ranks. The set-up of the group waits for all ranks, so all instances must be
    updated together, and an instance that comes later is not in the group.
    """

    def __init__(
        self,
        update_info: Callable[[int], Any],
        init_info: Mapping[str, Any],
        fleet: Callable[[], Sequence[InstanceClient]],
        draft_info: Callable[[int], Any] = lambda version: None,
    ) -> None:
        self._draft_info = draft_info
        self._init_info = init_info
        self._update_info = update_info
        self._initialized: WeakKeyDictionary[InstanceClient, float] = WeakKeyDictionary()
        self._fleet = fleet
        self._group: asyncio.Task[dict[InstanceClient, Any]] | None = None

    async def __call__(self, client: InstanceClient, version: int) -> None:
        workers = _workers(client)
        if self._initialized.get(client) != workers.started_at:
            body = {"init_info": await self._own_init_info(client)}
            await workers.weight_transfer(endpoints.INIT_TRANSFER, body, LOAD_LIMIT_S)
            self._initialized[client] = workers.started_at
        steps = {
            endpoints.START_UPDATE: self._update_info(version),
            endpoints.START_DRAFT_UPDATE: self._draft_info(version),
        }
        for start, infos in steps.items():
            if infos is None:
                continue
            await workers.weight_transfer(start, {}, LOAD_LIMIT_S)
            for info in infos if isinstance(infos, list) else [infos]:
                body = {"update_info": info}
                await workers.weight_transfer(endpoints.UPDATE_WEIGHTS, body, LOAD_LIMIT_S)
            await workers.weight_transfer(endpoints.FINISH_UPDATE, {}, LOAD_LIMIT_S)

    async def _own_init_info(self, client: InstanceClient) -> Any:
        """Raises InstanceError if the instance is not in the group that was set up."""
        if VLLM.first not in self._init_info:
            return self._init_info
        if self._group is None:
            self._group = asyncio.ensure_future(_dealt(self._init_info, self._fleet()))
        try:
            dealt = await asyncio.shield(self._group)
        except (CallerError, InstanceError):
            self._group = None
            raise
        if client not in dealt or client in self._initialized:
            raise InstanceError(
                "it had not joined when the ranks of the weight transfer were assigned, so it "
                "would wait forever: publish with another init_info, such as a new port"
            )
        return dealt[client]


async def _dealt(
    info: Mapping[str, Any], fleet: Sequence[InstanceClient]
) -> dict[InstanceClient, Any]:
    """`info` for each instance, with its ranks."""
    sizes = await asyncio.gather(*(_workers(client).world_size() for client in fleet))
    return dict(zip(fleet, deal(info, VLLM, sizes), strict=True))


def _workers(client: InstanceClient) -> WeightClient:
    if not hasattr(client, "collective_rpc"):
        raise CallerError(f"{client.name}: {type(client).__name__} cannot load weights")
    return cast(WeightClient, client)
