"""vLLM's names for the metrics that show an instance's load."""

from __future__ import annotations

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"  # from 0 to 1
PREEMPTIONS = "vllm:num_preemptions_total"
GENERATED_TOKENS = "vllm:generation_tokens_total"

#: With the label `source`: where the KV of a prompt's tokens came from.
PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
COMPUTED = "local_compute"
CACHED = "local_cache_hit"

#: One sample for each engine, all equal; its labels have the sizes.
CACHE_CONFIG = "vllm:cache_config_info"

#: Unix seconds; of Prometheus's client library, not vLLM's own.
STARTED_AT = "process_start_time_seconds"
