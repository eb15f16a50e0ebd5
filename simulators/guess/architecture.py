"""What a step reads and multiplies in a model, from its Hugging Face `config.json`.

Modelled are decoders whose attention is grouped-query or latent (MLA), in all layers or sliding in
some of them, and whose feed-forward layers are dense or a mixture of experts. Anything else is
refused: linear and sparse attention have costs that do not grow with the context as the replay's
cost model has it, and a mixture of experts guessed as a dense model is off by the ratio of its
total to its active parameters.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from rollout_sched.config import nearest
from rollout_sched.core.errors import CallerError


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model in numbers of parameters and of values in the KV cache.

    attention      parameters of all attention layers
    shared         of what every token passes besides: dense feed-forward layers, shared experts,
                   routers, norms, the output layer
    looked_up      of an embedding that is not the output layer too
    routed         of all routed experts
    experts        routed experts of a layer; 0: dense
    chosen         how many of them a token is routed to
    expert_layers  layers with routed experts
    kv_values      in the KV cache for one token, in the layers that attend to all
    kv_parts       into how many parts tensor parallelism can split them: KV heads, 1 with MLA
    window_values  in the KV cache for one sequence, in the layers with a sliding window
    pair_flops     operations of one query and one key, in the layers that attend to all
    published      precision of the published weights
    """

    layers: int
    hidden: int
    attention: float
    shared: float
    looked_up: float
    kv_values: int
    kv_parts: int
    pair_flops: int
    routed: float = 0.0
    experts: int = 0
    chosen: int = 0
    expert_layers: int = 0
    window_values: int = 0
    published: str = "bf16"

    @property
    def params(self) -> float:
        return self.attention + self.shared + self.looked_up + self.routed

    @property
    def active_params(self) -> float:
        """Parameters that a token is multiplied with."""
        return self.attention + self.shared + self.routed * self.expert_share

    @property
    def expert_share(self) -> float:
        """Share of the routed experts that one token takes."""
        return self.chosen / self.experts if self.experts else 0.0


# ------------------------------------------------------------------------------------------
# Models by name, by file, and from a number of parameters.


def model_named(name: str) -> Model:
    """The model of this hub name; case and the part before the slash do not matter. Raises
    CallerError with the nearest name."""
    known = _by_name()
    wanted = name.lower()
    found = known.get(wanted) or known.get(wanted.partition("/")[2])
    if found is None:
        short = {each for each in known if "/" not in each}
        raise CallerError(
            f"model {name!r} is not in the table{nearest(wanted.rpartition('/')[2], short)}; give "
            f"its config.json, or one of: {', '.join(configs())}"
        )
    return model_of(found, name)


def model_in(path: Path) -> Model:
    """The model of a `config.json`, or of a folder that holds one. Raises CallerError, OSError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise CallerError(f"{file}: {error}") from error
    if not isinstance(config, dict):
        raise CallerError(f"{file}: expected a JSON object, as in a model's config.json")
    return model_of(config, str(file))


def configs() -> dict[str, dict[str, Any]]:
    """The keys of each known model's `config.json` that matter, by hub name."""
    return tomllib.loads((files(__package__) / "models.toml").read_text())


def _by_name() -> dict[str, dict[str, Any]]:
    found = {}
    for name, config in configs().items():
        for each in (name, *config.get("also", ())):
            found[each.lower()] = found[each.lower().rpartition("/")[2]] = config
    return found


#: The usual values, for a dense model of which little is known. A transformer has about 12
#: parameters for each layer and squared hidden size.
_PER_LAYER = 12
_HEAD_DIM = 128
_KV_HEADS = 8
_VOCABULARY = 150_000

Shape = dict[str, int]


def usual_shape(params: float, layers: int, given: Mapping[str, int | None]) -> Shape:
    """hidden, heads, kv_heads, head_dim and vocabulary: those given, the rest as usual."""
    known = {name: value for name, value in given.items() if value is not None}
    head_dim = known.get("head_dim", _HEAD_DIM)
    hidden = known.get("hidden") or 128 * round(math.sqrt(params / (_PER_LAYER * layers)) / 128)
    hidden = max(hidden, head_dim)
    usual = {
        "hidden": hidden,
        "heads": max(1, hidden // head_dim),
        "kv_heads": _KV_HEADS,
        "head_dim": head_dim,
        "vocabulary": min(_VOCABULARY, max(1, int(params // (4 * hidden)))),
    }
    return {**usual, **known}


def dense_model(params: float, layers: int, shape: Shape) -> Model:
    """A dense model with this many parameters, of a shape as of `usual_shape`."""
    hidden, heads, kv_heads = shape["hidden"], shape["heads"], shape["kv_heads"]
    attention = float(layers * 2 * hidden * shape["head_dim"] * (heads + kv_heads))
    looked_up = float(shape["vocabulary"] * hidden)
    attention = min(attention, params - looked_up)
    return Model(
        layers=layers,
        hidden=hidden,
        attention=attention,
        shared=params - attention - looked_up,
        looked_up=looked_up,
        kv_values=2 * layers * kv_heads * shape["head_dim"],
        kv_parts=kv_heads,
        pair_flops=4 * layers * heads * shape["head_dim"],
    )


# ------------------------------------------------------------------------------------------
# From a config.json. Families differ in the names of keys, and in what a missing key means.

_DENSE = {"llama", "mistral", "qwen2", "qwen3"}
_GROUPED = {"glm4_moe", "gpt_oss", "minimax", "minimax_m2", "mixtral", "qwen2_moe", "qwen3_moe"}
_LATENT = {"deepseek_v2", "deepseek_v3", "kimi_k2"}

#: Keys of layers that are not modelled, and what they are.
_REFUSED = {
    "linear_num_value_heads": "linear attention (Gated DeltaNet)",
    "linear_attn_config": "linear attention",
    "mamba_d_state": "Mamba layers",
    "mamba_num_heads": "Mamba layers",
    "ssm_state_size": "state-space layers",
    "index_topk": "sparse attention with an indexer",
    "attn_type_list": "lightning attention in some layers",
}
_MEASURE = "measure it with `rollout-sched calibrate URL`, or give a scenario's [cost] by hand"

Config = Mapping[str, Any]


def model_of(config: Config, name: str) -> Model:
    """The model with this configuration; `name` is for errors. One for images or audio counts as
    its text model. Raises CallerError for an architecture that is not modelled."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {"quantization_config": config.get("quantization_config"), **text}
    kind = config.get("model_type")
    for key, layers in _REFUSED.items():
        if config.get(key) and not _all_full(config, key):
            raise CallerError(
                f"{name}: {kind} has {layers} ({key}), which the cost model has no term for; "
                f"{_MEASURE}"
            )
    if kind not in _DENSE | _GROUPED | _LATENT:
        known = ", ".join(sorted(_DENSE | _GROUPED | _LATENT))
        raise CallerError(
            f"{name}: architecture {kind!r} is not modelled; {_MEASURE}. Modelled are: {known}"
        )
    try:
        return _built(config, name)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise CallerError(f"{name}: not a complete config.json of a {kind} model: {error!r}") from (
            error
        )


def _all_full(config: Config, key: str) -> bool:
    """MiniMax-M2 lists a kind of attention for each layer, and all are full attention (1)."""
    return key == "attn_type_list" and all(kind == 1 for kind in config[key])


def _built(config: Config, name: str) -> Model:
    layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
    attention, values, flops, parts = (
        _latent(config) if config["model_type"] in _LATENT else _grouped(config)
    )
    sliding = _sliding_layers(config, name)
    full = layers - sliding
    experts, expert_layers, routed, others = _feed_forward(config)
    embedding = float(config["vocab_size"] * hidden)
    tied = bool(config.get("tie_word_embeddings", False))
    norms = (2 * layers + 1) * hidden
    return Model(
        layers=layers,
        hidden=hidden,
        attention=float(layers * attention),
        shared=others + norms + embedding,
        looked_up=0.0 if tied else embedding,
        kv_values=full * values,
        kv_parts=parts,
        pair_flops=full * flops,
        routed=routed,
        experts=experts,
        chosen=int(_first(config, "num_experts_per_tok", "experts_per_token")) if experts else 0,
        expert_layers=expert_layers,
        window_values=sliding * values * int(config["sliding_window"]) if sliding else 0,
        published=_published(config, name),
    )


def _grouped(config: Config) -> tuple[int, int, int, int]:
    """Of one layer with grouped-query attention: parameters, KV values of a token, operations of a
    query and a key, KV heads."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    dim = config.get("head_dim") or hidden // heads
    biased = config.get("attention_bias", config["model_type"] in ("qwen2", "qwen2_moe"))
    bias = (heads + 2 * kv_heads) * dim if biased else 0
    params = 2 * hidden * dim * (heads + kv_heads) + bias
    return params, 2 * kv_heads * dim, 4 * heads * dim, kv_heads


def _latent(config: Config) -> tuple[int, int, int, int]:
    """The same of a layer with multi-head latent attention, whose KV cannot be split by heads."""
    hidden, heads, rope = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["qk_rope_head_dim"],
    )
    latent, nope, value = config["kv_lora_rank"], config["qk_nope_head_dim"], config["v_head_dim"]
    query, rank = heads * (nope + rope), config.get("q_lora_rank")
    params = hidden * rank + rank * query if rank else hidden * query
    params += hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    return params, latent + rope, 2 * heads * (nope + rope + value), 1


def _sliding_layers(config: Config, name: str) -> int:
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if not window or config.get("use_sliding_window") is False:
        return 0
    layers = int(config["num_hidden_layers"])
    sliding = kinds.count("sliding_attention") if kinds else layers
    if sliding == layers:
        raise CallerError(
            f"{name}: all layers have a sliding window of {window:,} tokens, so the KV of a "
            f"sequence stops growing, which the replay does not model; {_MEASURE}"
        )
    return int(sliding)


def _feed_forward(config: Config) -> tuple[int, int, float, float]:
    """Routed experts of a layer, layers that have them, parameters of all of them, and the
    parameters of the rest of the feed-forward layers."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    dense = 3 * hidden * config["intermediate_size"]
    experts = int(
        _first(config, "num_experts", "n_routed_experts", "num_local_experts", default=0) or 0
    )
    if not experts:
        return 0, 0, 0.0, float(layers * dense)
    every = int(_first(config, "decoder_sparse_step", "moe_layer_freq", default=1))
    without = set(config.get("mlp_only_layers") or range(config.get("first_k_dense_replace", 0)))
    sparse = sum((n + 1) % every == 0 and n not in without for n in range(layers))
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = config.get("shared_expert_intermediate_size") or width * int(
        _first(config, "n_shared_experts", "num_shared_experts", default=0) or 0
    )
    bias = 2 * width + hidden if config["model_type"] == "gpt_oss" else 0
    one = 3 * hidden * width + bias
    others = (layers - sparse) * dense + sparse * (3 * hidden * shared + hidden * experts)
    return experts, sparse, float(sparse * experts * one), float(others)


def _first(config: Config, *names: str, default: Any = None) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    if default is None:
        raise KeyError(" or ".join(names))
    return default


#: quant_method of a quantization_config, as the precision of the formula.
_METHODS = {"fp8": "fp8", "mxfp4": "fp4", "fbgemm_fp8": "fp8"}


def _published(config: Config, name: str) -> str:
    found = config.get("quantization_config")
    if not found:
        return "bf16"
    method = str(found.get("quant_method"))
    if method == "compressed-tensors":
        groups = found.get("config_groups") or {}
        bits = {(group.get("weights") or {}).get("num_bits") for group in groups.values()}
        method = "mxfp4" if bits == {4} else "fp8" if bits == {8} else method
    if method not in _METHODS:
        raise CallerError(
            f"{name}: weights quantised by {method!r} are not modelled; give the config.json of "
            f"the unquantised model and --weights"
        )
    return _METHODS[method]
