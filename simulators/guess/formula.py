"""Cost constants from a GPU's data sheet and a model's shape: a first guess, to be calibrated.

    w   = W / (e_w HBM),  W = bytes of the weights on one GPU,  e_w = share * W / (W + small);
          t_w of those that every step reads, t_e of the routed experts, q = chosen / experts
    s   = 2 * active params / (TP * e_f * peak) + network
    k   = KV bytes per token / (parts * 0.65 * HBM)
    a   = operations of a query and a key / (TP * 0.5 * peak)
    t0  = 0.13 ms + 16.75 us * layers + 2 * layers * collective
    c_b = 4.4 us + KV bytes of the windows / (parts * 0.65 * HBM)
    KV  = parts * (0.9 * memory - 3 GB - W) / KV bytes per token, and the share of it asked for

The KV of an instance is split into min(TP, KV heads) parts; the rest of TP has copies, so MLA has
one part. With attention in data parallel each GPU has its own sequences, and TP parts, but all
weights other than routed experts on each. Experts are sliced by TP, or with expert parallelism
spread; then the GPU counts that has most of a token's experts, about c + sqrt(2 c ln TP) of them
with c = chosen / TP.

Instances of several nodes send over one link per GPU: an all-reduce 4 hidden (m - 1) / m bytes a
token and GPU of a node, twice a layer, with m nodes; data parallelism sends a token to as many
other nodes as it can have experts on, and back. Each such collective takes 30 us more.

simulators/instance/README.md has the sources of the numbers, and their errors where measurements
exist. Weights and KV of 8 bits have half the bytes; the matrix multiplications stay those of bf16,
as with weights alone quantised. Not covered: speculative decoding, uneven routing, overlap of
communication.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Annotated, Any, Literal

import msgspec

from rollout_sched.config import nearest
from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.records import MAX_COUNT, Count, Size
from rollout_sched.simulators.guess.architecture import Model
from rollout_sched.simulators.instance import CostModel

# ------------------------------------------------------------------------------------------
# The table of GPUs.

Positive = Annotated[float, msgspec.Meta(gt=0)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]

#: What a GPU inherits from the GPU that it is like.
_FITTED = ("bandwidth_share", "small_bytes", "flops_share", "all_reduce_s")


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU of gpus.toml; flops_share and all_reduce_s are by tensor parallelism.

    node_gpus         GPUs that NVLink or the like connects
    link_bytes_per_s  of one GPU to other nodes, in one direction
    """

    about: str
    hbm_bytes_per_s: Positive
    flops: Positive
    memory_bytes: Positive
    bandwidth_share: Positive
    small_bytes: Positive
    flops_share: dict[Size, float]
    all_reduce_s: dict[Size, float]
    node_gpus: AtLeastOne = 8
    link_bytes_per_s: Positive = 50e9
    like: str = ""


def gpus() -> dict[str, Gpu]:
    table = _table("gpus.toml")
    whole = {name: {**_inherited(table, row), **row} for name, row in table.items()}
    found: dict[str, Gpu] = msgspec.convert(whole, dict[str, Gpu], strict=False)
    return found


def gpu_named(name: str) -> Gpu:
    """The GPU of this name. Raises CallerError with the nearest name."""
    known = gpus()
    found = known.get(name.lower())
    if found is None:
        raise CallerError(
            f"GPU {name!r} is not in the table{nearest(name.lower(), known)}; give --hbm-tb-s, "
            f"--tflops and --memory-gb, or one of: {', '.join(known)}"
        )
    return found


def _table(file: str) -> dict[str, Any]:
    return tomllib.loads((files(__package__) / file).read_text())


def _inherited(table: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    like = table.get(row.get("like", ""), {})
    return {name: like[name] for name in _FITTED if name in like}


Weights = Literal["bf16", "fp8", "int8", "fp4"]

#: Of a parameter, and of a value in the KV cache. fp4 has a scale for each 32 values.
_BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.53}
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
_NETWORK_S = 30e-6  # of one collective between nodes
_DISPATCHED_BYTES = 4  # of a hidden value sent to an expert, and back
_SEQUENCES, _BATCHED_TOKENS = 256, 8192  # of one scheduler


class Layout(msgspec.Struct, frozen=True):
    """Which GPUs serve, and which train.

    gpus          in total
    tp            GPUs per instance, by tensor parallelism; above 8 a multiple of 8
    trainer_gpus  of a separate trainer; 0: it takes turns with the instances on all of them
    ep            expert parallelism: whole experts on each GPU of an instance
    dp_attention  attention in data parallel: each GPU of an instance has sequences of its own, and
                  all weights but the experts; implies expert parallelism
    """

    gpus: AtLeastOne = 8
    tp: AtLeastOne = 1
    trainer_gpus: Count = 0
    ep: bool = False
    dp_attention: bool = False

    @property
    def instances(self) -> int:
        return (self.gpus - self.trainer_gpus) // self.tp

    @property
    def replicas(self) -> int:
        """Schedulers of an instance, each with max_num_seqs of its own."""
        return self.tp if self.dp_attention else 1

    def kv_parts(self, model: Model) -> int:
        """Into how many parts the KV of an instance is split."""
        return self.tp if self.dp_attention else min(self.tp, model.kv_parts)


class Precision(msgspec.Struct, frozen=True):
    """What the instances generate with; the trainer and what it sends are bf16. Rollouts in 8 bits
    are FlashRL's (fengyao.notion.site/flash-rl, 2025-08: worth it from about 14B, and only with
    truncated importance sampling) and FP8-RL's (arXiv 2601.18150: up to 44 % more throughput, with
    fp8 KV too).

    weights       of the model that generates; default: as published. fp4 is of routed experts
                  alone, if there are any
    kv            of its KV cache
    requantise_s  seconds an update takes longer, to quantise the new weights; measure it
    """

    weights: Weights | None = None
    kv: Literal["bf16", "fp8", "int8"] = "bf16"
    requantise_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0


BF16 = Precision("bf16")


def kv_bytes(model: Model, precision: Precision = BF16) -> float:
    """KV bytes of one token, in the layers that attend to all."""
    return model.kv_values * _BYTES[precision.kv]


def weight_bytes(model: Model, layout: Layout, precision: Precision) -> tuple[float, float]:
    """On one GPU: bytes of the weights that every step reads, and of routed experts."""
    weights = precision.weights or model.published
    others = "bf16" if weights == "fp4" and model.experts else weights
    split = layout.tp // layout.replicas
    always = _BYTES[others] * (model.attention + model.shared) / split
    return always, _BYTES[weights] * model.routed / layout.tp


def cost(gpu: Gpu, model: Model, layout: Layout, precision: Precision = BF16) -> CostModel:
    """The cost model of one instance. Raises CallerError for a tp without figures."""
    tp, parts = layout.tp, layout.kv_parts(model)
    always, experts = weight_bytes(model, layout, precision)
    share = gpu.bandwidth_share * (always + experts) / (always + experts + gpu.small_bytes)
    read_s = 1 / (share * gpu.hbm_bytes_per_s)
    kv_read_s = _BYTES[precision.kv] / (parts * _KV_SHARE * gpu.hbm_bytes_per_s)
    collective_s, sent_s = _communication(gpu, model, layout)
    flops = _by_tp(gpu.flops_share, tp) * gpu.flops * tp
    return CostModel(
        step_s=_STEP_S + _LAYER_S * model.layers + 2 * model.layers * collective_s,
        weights_s=always * read_s,
        token_s=2 * model.active_params / flops + sent_s,
        sequence_s=_SEQUENCE_S + model.window_values * kv_read_s,
        context_s=model.kv_values * kv_read_s,
        attention_s=model.pair_flops / (tp * _ATTENTION_SHARE * gpu.flops),
        experts_s=experts * read_s,
        expert_share=_expert_share(model, layout),
    )


def _expert_share(model: Model, layout: Layout) -> float:
    """Share of the experts on a GPU that one token takes there, on the GPU that has most of it."""
    if not model.experts or not (layout.ep or layout.dp_attention):
        return model.expert_share
    mean = model.chosen / layout.tp
    most = min(mean + math.sqrt(2 * mean * math.log(layout.tp)), model.chosen)
    return min(1.0, most * layout.tp / model.experts)


def _communication(gpu: Gpu, model: Model, layout: Layout) -> tuple[float, float]:
    """Seconds of one collective whatever its size, and of what one token sends between nodes."""
    if layout.tp == 1:
        return 0.0, 0.0
    inside_s = _by_tp(gpu.all_reduce_s, layout.tp)
    nodes = -(-layout.tp // gpu.node_gpus)
    if nodes == 1:
        return inside_s, 0.0
    if layout.dp_attention:
        others = min(model.chosen, nodes - 1)
        sent = model.expert_layers * others * _DISPATCHED_BYTES * model.hidden / layout.tp
    else:
        all_reduce = 2 * (nodes - 1) / nodes * _BYTES["bf16"] * model.hidden
        sent = 2 * model.layers * all_reduce / gpu.node_gpus
    return inside_s + _NETWORK_S, sent / gpu.link_bytes_per_s


def kv_tokens(gpu: Gpu, model: Model, layout: Layout, precision: Precision = BF16) -> int:
    """KV tokens of one instance. Raises CallerError if the weights leave no room."""
    always, experts = weight_bytes(model, layout, precision)
    looked_up = _BYTES["bf16"] * model.looked_up * layout.replicas / layout.tp
    room = _USABLE_MEMORY * gpu.memory_bytes - _ACTIVATIONS_BYTES
    left = layout.kv_parts(model) * (room - always - experts - looked_up)
    windows = _SEQUENCES * layout.replicas * model.window_values * _BYTES[precision.kv]
    share = 1.0 if layout.trainer_gpus else _COLOCATED_KV
    tokens = int((share * left - windows) / kv_bytes(model, precision))
    if tokens < 1:
        raise CallerError(
            f"TP{layout.tp} of this GPU has no room for {model.params:.3g} parameters in "
            f"{precision.weights or model.published} and a KV cache: give a larger --tp"
        )
    return tokens


def scenario(gpu: Gpu, model: Model, layout: Layout, precision: Precision = BF16) -> dict[str, Any]:
    """The tables of a scenario. Raises CallerError for an impossible layout."""
    if layout.instances < 1:
        raise CallerError(
            f"{layout.gpus} GPUs, {layout.trainer_gpus} of them for the trainer, leave none for an "
            f"instance of {layout.tp}: increase --gpus, or decrease --tp"
        )
    if layout.dp_attention and not model.experts:
        raise CallerError("--dp-attention is for mixtures of experts: decrease --tp instead")
    training = layout.trainer_gpus or layout.gpus
    trained = model.params - model.routed * (1 - model.expert_share)
    tables: dict[str, Any] = {
        "fleet": {
            "instances": layout.instances,
            "kv_tokens": kv_tokens(gpu, model, layout, precision),
            "max_num_seqs": _SEQUENCES * layout.replicas,
            "max_num_batched_tokens": _BATCHED_TOKENS * layout.replicas,
        },
        "cost": msgspec.structs.asdict(cost(gpu, model, layout, precision)),
        "trainer": {
            "placement": "disaggregated" if layout.trainer_gpus else "colocated",
            "fixed_s": 10.0,
            "seconds_per_token": _TRAINER_FLOPS * trained / (training * _TRAINER_SHARE * gpu.flops),
        },
        "weights": {
            "fixed_s": 1.0 + precision.requantise_s,
            "bytes": _BYTES["bf16"] * model.params,
            "bytes_per_s": _LINK_BYTES_PER_S * layout.tp,
        },
    }
    return tables


def _by_tp(table: dict[int, float], tp: int) -> float:
    """Of several nodes, the value of the largest part of a node that the table has."""
    most = max(table)
    if tp > most and tp % most == 0:
        return table[most]
    if tp not in table:
        raise CallerError(
            f"--tp {tp}: there are figures for {', '.join(map(str, sorted(table)))} and multiples "
            f"of {most}"
        )
    return table[tp]
