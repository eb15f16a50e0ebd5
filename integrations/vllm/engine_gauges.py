"""The load of an in-process engine, which the engine pushes after every step, without polling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout_sched.live.ports import Gauges


class EngineGauges:
    """Pass `logger_factory()` to `AsyncLLM.from_engine_args(..., stat_loggers=[...])`.

    Sums over the engines of one AsyncLLM (data-parallel ranks); `kv_usage` is their mean.
    """

    def __init__(self) -> None:
        self._states: dict[int, Any] = {}
        self._preemptions = 0
        self._prefill_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, engine: int = 0) -> None:
        """One step of an engine, from vLLM 0.32's `SchedulerStats` and `IterationStats`."""
        if scheduler_stats is not None:
            self._states[engine] = scheduler_stats
        if iteration_stats is not None:
            prompts = iteration_stats.prompt_token_stats
            self._preemptions += iteration_stats.num_preempted_reqs
            self._prefill_tokens += prompts.computed
            self._cached_tokens += prompts.local_cache_hit
            self._generated_tokens += iteration_stats.num_generation_tokens

    def now(self) -> Gauges:
        states = self._states.values()
        return Gauges(
            running=sum(s.num_running_reqs for s in states),
            waiting=sum(s.num_waiting_reqs + s.num_skipped_waiting_reqs for s in states),
            kv_usage=sum(s.kv_cache_usage for s in states) / max(len(states), 1),
            preemptions=self._preemptions,
            prefill_tokens=self._prefill_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
        )

    def logger_factory(self) -> Callable[..., Any]:
        """A vLLM stat logger that pushes into this."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        gauges = self

        class Push(StatLoggerBase):  # type: ignore[misc, unused-ignore]
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                self._engine = engine_index

            def record(
                self,
                scheduler_stats: Any,
                iteration_stats: Any,
                mm_cache_stats: Any = None,
                engine_idx: int = 0,
            ) -> None:
                gauges.record(scheduler_stats, iteration_stats, self._engine)

            def log_engine_initialized(self) -> None: ...

        return Push
