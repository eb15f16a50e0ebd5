"""Runs a vLLM engine in this process step by step, and records the work and time of each step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.vllm.engine_limits import EngineLimits


class EngineStep(NamedTuple):
    """One step: as `simulators.instance.cost_fit.Observation`, and the requests it admitted."""

    sequences: int
    prefill_tokens: int
    context: int
    attention: float
    requests: int
    seconds: float

    @property
    def tokens(self) -> int:
        return self.sequences + self.prefill_tokens


class SteppedEngine:
    """vLLM's synchronous `LLMEngine`, its scheduler in this process.

    engine  an LLMEngine created with VLLM_ENABLE_V1_MULTIPROCESSING=0
    clock   returns seconds
    """

    def __init__(self, engine: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine = engine
        self._clock = clock
        self._scheduler = engine.engine_core.engine_core.scheduler
        self._decided: EngineStep | None = None
        self._sent = 0
        schedule = self._scheduler.schedule

        def remembering(*args: Any, **kwargs: Any) -> Any:
            decided = schedule(*args, **kwargs)
            self._decided = self._step(decided)
            return decided

        self._scheduler.schedule = remembering

    @classmethod
    def start(cls, model: str, arguments: Mapping[str, Any]) -> SteppedEngine:
        """A new engine; `arguments` are fields of vLLM's EngineArgs. Raises CallerError if vLLM is
        not installed, or does not accept the arguments."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vllm is imported
        try:
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine
        except ImportError as error:
            raise CallerError(
                f"vLLM is not installed in this environment ({error}): install it, or calibrate a "
                "running server by its URL"
            ) from error
        try:
            engine = LLMEngine.from_engine_args(EngineArgs(model=model, **arguments))
        except (TypeError, ValueError, OSError) as error:
            raise CallerError(f"vLLM does not start with model {model!r}: {error}") from error
        return cls(engine)

    @property
    def slots(self) -> int:
        return int(self._engine.vllm_config.scheduler_config.max_num_seqs)

    @property
    def max_model_len(self) -> int:
        return int(self._engine.vllm_config.model_config.max_model_len)

    @property
    def kv_tokens(self) -> int:
        cache = self._engine.vllm_config.cache_config
        return int(cache.num_gpu_blocks * cache.block_size)

    @property
    def limits(self) -> EngineLimits:
        import vllm

        config = self._engine.vllm_config
        return EngineLimits(
            int(config.cache_config.block_size),
            bool(config.cache_config.enable_prefix_caching),
            int(config.scheduler_config.max_num_batched_tokens),
            str(vllm.__version__),
        )

    def burst(
        self, prompts: Sequence[Sequence[int]], new: Sequence[int], sampling: Mapping[str, Any]
    ) -> list[EngineStep]:
        """The steps of requests that arrive at once; `new`: how many tokens each makes."""
        from vllm import SamplingParams

        for prompt, tokens in zip(prompts, new, strict=True):
            self._sent += 1
            params = SamplingParams(**sampling, max_tokens=tokens, detokenize=False)
            request = {"prompt_token_ids": list(prompt)}
            self._engine.add_request(f"calibrate-{self._sent}", request, params)
        steps = []
        while self._engine.has_unfinished_requests():
            start = self._clock()
            self._engine.step()
            seconds = self._clock() - start
            if self._decided is not None and self._decided.tokens:
                steps.append(self._decided._replace(seconds=seconds))
        return steps

    def _step(self, decided: Any) -> EngineStep:
        """The step that the scheduler has decided; it already counts its tokens as computed."""
        sequences, prefill, context, attention = 0, 0, 0, 0.0
        for name, tokens in decided.num_scheduled_tokens.items():
            request = self._scheduler.requests[name]
            computed = request.num_computed_tokens - tokens
            if computed < request.num_prompt_tokens:
                prefill += tokens
                attention += tokens * (computed + tokens / 2)
            else:
                sequences += 1
                context += computed + 1
        admitted = len(decided.scheduled_new_reqs)
        return EngineStep(sequences, prefill, context, attention, admitted, 0.0)
