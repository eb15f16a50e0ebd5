"""Cost constants from a GPU's data sheet and a model's shape: a first guess, to be calibrated.

    t_w = W / (e_w HBM),  W = bytes * params read / TP,  e_w = share * W / (W + small)
    s   = 2 * params read / (TP * e_f * peak)
    k   = KV bytes per token / (TP * 0.65 * HBM)
    a   = 4 * heads * head_dim * layers / (TP * 0.5 * peak)
    t0  = 0.13 ms + 16.75 us * layers + 2 * layers * all-reduce
    c_b = 4.4 us
    KV  = ((0.9 * memory - 3 GB) * TP - weights) / KV bytes per token, and the share of it asked for

simulators/instance/README.md has the sources of the numbers, and their errors where measurements
exist. Weights and KV of 8 bits have half the bytes; the matrix multiplications stay those of bf16,
as with weights alone quantised. Not covered: mixtures of experts, sliding windows, speculative
decoding.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from rollout_sched.config import nearest
from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.records import MAX_COUNT, Count, Size
from rollout_sched.simulators.instance import CostModel

# ------------------------------------------------------------------------------------------
# The tables of GPUs and models.

Positive = Annotated[float, msgspec.Meta(gt=0)]
_T = TypeVar("_T")
AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]

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
    flops_share: dict[Size, float]
    all_reduce_s: dict[Size, float]
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


_BYTES = {"bf16": 2, "fp8": 1, "int8": 1}  # of a parameter, and of a value in the KV cache
_STEP_S = 0.13e-3
_LAYER_S = 16.75e-6
_SEQUENCE_S = 4.4e-6
_KV_SHARE = 0.65
_ATTENTION_SHARE = 0.5
_USABLE_MEMORY = 0.9
_ACTIVATIONS_BYTES = 3e9
_TRAINER_FLOPS = 8  # for each parameter and token: forward, backward, and log-probabilities
_TRAINER_SHARE = 0.4
_LINK_BYTES_PER_S = 10e9  # of new weights into one GPU
_COLOCATED_KV = 0.5  # the optimiser needs the rest
#: A transformer has about 12 parameters for each layer and squared hidden size.
_PER_LAYER = 12
_HEAD_DIM = 128
_KV_HEADS = 8
_VOCABULARY = 150_000


class Layout(msgspec.Struct, frozen=True):
    """Which GPUs serve, and which train.

    gpus          in total
    tp            GPUs per instance, by tensor parallelism
    trainer_gpus  of a separate trainer; 0: it takes turns with the instances on all of them
    """

    gpus: AtLeastOne = 8
    tp: AtLeastOne = 1
    trainer_gpus: Count = 0

    @property
    def instances(self) -> int:
        return (self.gpus - self.trainer_gpus) // self.tp


class Precision(msgspec.Struct, frozen=True):
    """What the instances generate with; the trainer and what it sends are bf16. Rollouts in 8 bits
    are FlashRL's (fengyao.notion.site/flash-rl, 2025-08: worth it from about 14B, and only with
    truncated importance sampling) and FP8-RL's (arXiv 2601.18150: up to 44 % more throughput, with
    fp8 KV too).

    weights       of the model that generates
    kv            of its KV cache
    requantise_s  seconds an update takes longer, to quantise the new weights; measure it
    """

    weights: Literal["bf16", "fp8", "int8"] = "bf16"
    kv: Literal["bf16", "fp8", "int8"] = "bf16"
    requantise_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0


BF16 = Precision()


def shaped(params: float, layers: int, **known: int | None) -> Model:
    """A model of which little is known; the rest has the usual values for its size."""
    told = {name: value for name, value in known.items() if value is not None}
    hidden = told.get("hidden") or 128 * round(math.sqrt(params / (_PER_LAYER * layers)) / 128)
    head_dim = told.get("head_dim", _HEAD_DIM)
    usual: dict[str, Any] = {
        "hidden": max(hidden, head_dim),
        "heads": max(1, hidden // head_dim),
        "kv_heads": _KV_HEADS,
        "head_dim": head_dim,
        "vocabulary": min(_VOCABULARY, max(1, int(params // (4 * max(hidden, 1))))),
    }
    return Model(params=params, layers=layers, **{**usual, **told})


def kv_bytes(model: Model, precision: Precision = BF16) -> float:
    """KV bytes of one token."""
    return 2 * model.layers * model.kv_heads * model.head_dim * _BYTES[precision.kv]


def cost(gpu: Gpu, model: Model, tp: int, precision: Precision = BF16) -> CostModel:
    """The cost model of one instance on `tp` GPUs. Raises CallerError for a tp without figures."""
    flops = _by_tp(gpu.flops_share, tp) * gpu.flops * tp
    weights = _BYTES[precision.weights] * model.read_params / tp
    share = gpu.bandwidth_share * weights / (weights + gpu.small_bytes)
    all_reduces = 2 * model.layers * (_by_tp(gpu.all_reduce_s, tp) if tp > 1 else 0.0)
    attended = 4 * model.heads * model.head_dim * model.layers
    return CostModel(
        step_s=_STEP_S + _LAYER_S * model.layers + all_reduces,
        weights_s=weights / (share * gpu.hbm_bytes_per_s),
        token_s=2 * model.read_params / flops,
        sequence_s=_SEQUENCE_S,
        context_s=kv_bytes(model, precision) / (tp * _KV_SHARE * gpu.hbm_bytes_per_s),
        attention_s=attended / (tp * _ATTENTION_SHARE * gpu.flops),
    )


def kv_tokens(gpu: Gpu, model: Model, layout: Layout, precision: Precision = BF16) -> int:
    """KV tokens of one instance. Raises CallerError if the weights leave no room."""
    room = layout.tp * (_USABLE_MEMORY * gpu.memory_bytes - _ACTIVATIONS_BYTES)
    left = room - _BYTES[precision.weights] * model.params
    share = 1.0 if layout.trainer_gpus else _COLOCATED_KV
    tokens = int(share * left / kv_bytes(model, precision))
    if tokens < 1:
        raise CallerError(
            f"{layout.tp} of this GPU have no room for {model.params:.3g} parameters in "
            f"{precision.weights} and a KV cache: give a larger --tp"
        )
    return tokens


def scenario(gpu: Gpu, model: Model, layout: Layout, precision: Precision = BF16) -> dict[str, Any]:
    """The tables of a scenario. Raises CallerError for an impossible layout."""
    if layout.instances < 1:
        raise CallerError(
            f"{layout.gpus} GPUs, {layout.trainer_gpus} of them for the trainer, leave none for an "
            f"instance of {layout.tp}: increase --gpus, or decrease --tp"
        )
    training = layout.trainer_gpus or layout.gpus
    tables: dict[str, Any] = {
        "fleet": {
            "instances": layout.instances,
            "kv_tokens": kv_tokens(gpu, model, layout, precision),
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
        },
        "cost": msgspec.structs.asdict(cost(gpu, model, layout.tp, precision)),
        "trainer": {
            "placement": "disaggregated" if layout.trainer_gpus else "colocated",
            "fixed_s": 10.0,
            "seconds_per_token": _TRAINER_FLOPS
            * model.params
            / (training * _TRAINER_SHARE * gpu.flops),
        },
        "weights": {
            "fixed_s": 1.0 + precision.requantise_s,
            "bytes": _BYTES["bf16"] * model.params,
            "bytes_per_s": _LINK_BYTES_PER_S * layout.tp,
        },
    }
    return tables


def _by_tp(table: dict[int, float], tp: int) -> float:
    if tp not in table:
        raise CallerError(f"--tp {tp}: there are figures for {', '.join(map(str, sorted(table)))}")
    return table[tp]
