"""The tables of GPUs and models for a first guess."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Annotated, Any, TypeVar

import msgspec

from rollout_sched.config import nearest
from rollout_sched.core.model.errors import CallerError

Positive = Annotated[float, msgspec.Meta(gt=0)]
_T = TypeVar("_T")
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]

#: What a GPU inherits from the GPU that it is like.
_FITTED = ("bandwidth_share", "small_bytes", "flops_share", "all_reduce_s")


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU of gpus.toml; the last two fields are by tensor parallelism."""

    about: str
    hbm_bytes_per_s: Positive
    flops: Positive
    memory_bytes: Positive
    bandwidth_share: Positive
    small_bytes: Positive
    flops_share: dict[int, float]
    all_reduce_s: dict[int, float]
    like: str = ""


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A dense transformer with grouped-query attention, as described by its config.json."""

    params: Positive
    layers: AtLeastOne
    hidden: AtLeastOne
    heads: AtLeastOne
    kv_heads: AtLeastOne
    head_dim: AtLeastOne
    vocabulary: AtLeastOne
    tied: bool = False

    @property
    def read_params(self) -> float:
        """Parameters that a step multiplies with; a separate embedding is only looked up."""
        return self.params - (0 if self.tied else self.vocabulary * self.hidden)


def gpus() -> dict[str, Gpu]:
    table = _table("gpus.toml")
    whole = {name: {**_inherited(table, row), **row} for name, row in table.items()}
    found: dict[str, Gpu] = msgspec.convert(whole, dict[str, Gpu], strict=False)
    return found


def models() -> dict[str, Model]:
    found: dict[str, Model] = msgspec.convert(_table("models.toml"), dict[str, Model])
    return found


def gpu_named(name: str) -> Gpu:
    """The GPU of this name. Raises CallerError with the nearest name."""
    return _named("GPU", name, gpus())


def model_named(name: str) -> Model:
    """The model of this name. Raises CallerError with the nearest name."""
    return _named("model", name, models())


def _table(file: str) -> dict[str, Any]:
    return tomllib.loads((files(__package__) / file).read_text())


def _inherited(table: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    like = table.get(row.get("like", ""), {})
    return {name: like[name] for name in _FITTED if name in like}


def _named(noun: str, name: str, known: Mapping[str, _T]) -> _T:
    found = known.get(name.lower())
    if found is None:
        raise CallerError(
            f"{noun} {name!r} is not in the table{nearest(name, known)}; there are: "
            f"{', '.join(known)}"
        )
    return found
