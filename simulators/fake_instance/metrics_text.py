"""The part of vLLM's /metrics that shows a server's load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rollout_sched.integrations.vllm.protocol import gauges as names
from rollout_sched.live.ports import Gauges
from rollout_sched.simulators.fake_instance.engine import Engine

Values = Iterator[tuple[str, str, Mapping[str, object], float]]


def render(engine: Engine, gauges: Gauges) -> str:
    """The metrics in Prometheus' text format. Unlike vLLM's, the prompt counters also count tokens
    that are computed again after a preemption."""
    lines: list[str] = []
    last = ""
    for name, kind, labels, value in _values(engine, gauges):
        if name != last:
            lines.append(f"# TYPE {name} {kind}")
            last = name
        told = ",".join(f'{key}="{label}"' for key, label in labels.items())
        lines.append(f"{name}{{{told}}} {value}" if told else f"{name} {value}")
    return "\n".join(lines) + "\n"


def _values(engine: Engine, gauges: Gauges) -> Values:
    spec = engine.settings.spec
    own = {"engine": "0", "model_name": engine.settings.model}
    computed, cached = gauges.prefill_tokens, gauges.cached_tokens
    yield names.STARTED_AT, "gauge", {}, engine.started_at
    for name, value in {
        names.RUNNING: gauges.running,
        names.WAITING: gauges.waiting,
        names.KV_USAGE: gauges.kv_usage,
    }.items():
        yield name, "gauge", own, float(value)
    for reason, value in {"capacity": gauges.waiting, "deferred": 0}.items():
        name = "vllm:num_requests_waiting_by_reason"
        yield name, "gauge", {**own, "reason": reason}, float(value)
    for name, value in {
        names.PREEMPTIONS: gauges.preemptions,
        "vllm:prefix_cache_queries_total": computed + cached,
        "vllm:prefix_cache_hits_total": cached,
        "vllm:prompt_tokens_total": computed + cached,
        "vllm:prompt_tokens_cached_total": cached,
        names.GENERATED_TOKENS: gauges.generated_tokens,
    }.items():
        yield name, "counter", own, float(value)
    sources = {names.COMPUTED: computed, names.CACHED: cached, "external_kv_transfer": 0}
    for source, value in sources.items():
        yield names.PROMPT_TOKENS, "counter", {**own, "source": source}, float(value)
    for finish, value in engine.finished.items():
        name = "vllm:request_success_total"
        yield name, "counter", {**own, "finished_reason": finish}, float(value)
    config = {
        **own,
        "block_size": spec.block_size,
        "enable_prefix_caching": spec.prefix_caching,
        "kv_cache_size_tokens": spec.kv_blocks * spec.block_size,
        "num_gpu_blocks": spec.kv_blocks + 1,  # with vLLM's null block
    }
    yield names.CACHE_CONFIG, "gauge", config, 1.0
