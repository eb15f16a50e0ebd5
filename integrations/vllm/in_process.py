"""The live driver's client for a vLLM engine in this process (`AsyncLLM`)."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal, NamedTuple

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.vllm.calls import EngineLimits
from rollout_sched.integrations.vllm.dialects import AnswerAssembler, Chunk
from rollout_sched.integrations.vllm.protocol.answers import VersionSpan, version_of
from rollout_sched.live.ports import (
    Description,
    Gauges,
    InstanceError,
    OnTokens,
    Order,
    Output,
    RequestRejected,
)


class EngineGauges:
    """The load of an in-process engine, which the engine pushes after every step, without polling.
    Pass `logger_factory()` to `AsyncLLM.from_engine_args(..., stat_loggers=[...])`.

    Sums over the engines of one AsyncLLM (data-parallel ranks); `kv_usage` is their mean.
    """

    def __init__(self) -> None:
        self._states: dict[int, Any] = {}
        self._preemptions = 0
        self._prefill_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._drafts = 0
        self._drafted_tokens = 0
        self._accepted_tokens = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, engine: int = 0) -> None:
        """One step of an engine, from vLLM 0.32's `SchedulerStats` and `IterationStats`."""
        if scheduler_stats is not None:
            self._states[engine] = scheduler_stats
            drafts = scheduler_stats.spec_decoding_stats
            if drafts is not None:
                self._drafts += drafts.num_drafts
                self._drafted_tokens += drafts.num_draft_tokens
                self._accepted_tokens += drafts.num_accepted_tokens
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
            drafts=self._drafts,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
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


_LOWEST_LOGPROB = -9999.0  # what vLLM's server sends for -inf and NaN


class InProcessInstance:
    """An `AsyncLLM` (`live.ports.InstanceClient`). `close` leaves the engine to its owner.

    `gauges` must be the object that the engine has as a stat logger; `start` does that.
    """

    #: Constant: the engine lives as long as this process and is never restarted.
    started_at = 0.0

    def __init__(
        self, engine: Any, gauges: EngineGauges | None = None, name: str = "in-process"
    ) -> None:
        self.name = name
        self.engine = engine
        self._gauges = gauges

    @classmethod
    def start(cls, engine_args: Any, name: str = "in-process") -> InProcessInstance:
        """A new engine from vLLM's AsyncEngineArgs; call it in the event loop of the engine."""
        from vllm.v1.engine.async_llm import AsyncLLM

        gauges = EngineGauges()
        engine = AsyncLLM.from_engine_args(engine_args, stat_loggers=[gauges.logger_factory()])
        return cls(engine, gauges, name)

    async def describe(self) -> Description:
        config = self.engine.vllm_config
        engines = config.parallel_config.data_parallel_size
        served = config.model_config.served_model_name
        names = (served,) if isinstance(served, str) else tuple(served)
        return Description(
            slots=config.scheduler_config.max_num_seqs * engines,
            # vLLM's number of blocks is the sum over its engines.
            kv_tokens=config.cache_config.num_gpu_blocks * config.cache_config.block_size,
            max_model_len=config.model_config.max_model_len,
            version=await self.weight_version(),
            started_at=self.started_at,
            model=names[0],
            models=names if len(names) > 1 else (),
            paused=await self.is_paused(),
            capabilities=frozenset(
                {"generate", "abort", "pause", "collective_rpc", "weight_transfer"}
                | {"set_version", "weight_info", "weight_versions"}
            ),
        )

    async def generate(self, order: Order, on_tokens: OnTokens | None = None) -> Output:
        assembly = AnswerAssembler(order, on_tokens)
        wants_logprobs = order.sampling.get("logprobs") is not None
        async with aclosing(self._answers(order)) as answers:
            async for answer in answers:
                assembly.add(_chunk(answer.outputs[0], wants_logprobs))
        return assembly.output()

    async def _answers(self, order: Order) -> AsyncGenerator[Any, None]:
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import TokensPrompt

        params = _sampling_params(order)
        prompt = TokensPrompt(prompt_token_ids=list(order.token_ids))
        if order.salt:
            prompt["cache_salt"] = order.salt
        session = order.session or None
        try:
            async for answer in self.engine.generate(
                prompt, params, request_id=order.id, session_id=session
            ):
                yield answer
        except (VLLMClientError, ValueError) as error:
            body, unquoted = str(error).encode(), "the engine refused it"
            raise RequestRejected(str(error), body=body, unquoted=unquoted) from error
        except Exception as error:  # any failure of the engine
            unquoted = f"generate failed: {type(error).__name__}"
            raise InstanceError(f"{unquoted}: {error}", unquoted=unquoted) from error

    async def detokenize(self, token_ids: Sequence[int]) -> str | None:
        tokenizer = self.engine.tokenizer
        return None if tokenizer is None else tokenizer.decode([*token_ids])

    async def abort(self, order_id: str) -> None:
        await self.engine.abort(order_id)

    async def pause(self, mode: Literal["keep", "abort"], clear_cache: bool) -> None:
        await self._control(
            "pause", self.engine.pause_generation(mode=mode, clear_cache=clear_cache)
        )

    async def resume(self) -> None:
        await self._control("resume", self.engine.resume_generation())

    async def set_version(self, version: int) -> None:
        await self._control("set_version", self.engine.update_weight_version(str(version)))

    async def weight_version(self) -> int | None:
        return version_of(await self.engine.get_weight_version())

    async def is_paused(self) -> bool | None:
        told: bool = await self.engine.is_paused()
        return told

    def use_model(self, model: str) -> None:
        """Does nothing: all its names are aliases of one model."""

    async def collective_rpc(
        self, method: str, kwargs: Mapping[str, Any], limit_s: float | None = None
    ) -> None:
        """Call a method of every worker (`integrations.vllm.weights.WeightClient`)."""
        call = self.engine.collective_rpc(method, timeout=limit_s, kwargs=dict(kwargs))
        await self._control(method, call)

    async def weight_transfer(
        self, step: str, body: Mapping[str, Any], limit_s: float | None = None
    ) -> None:
        """A step of vLLM's weight transfer, by the name of its endpoint; `body` as that endpoint
        takes it."""
        await self.collective_rpc(step, body, limit_s)

    async def world_size(self) -> int:
        """How many ranks it has in a weight transfer (`integrations.vllm.ranks`)."""
        return int(self.engine.vllm_config.parallel_config.world_size_across_dp)

    async def gauges(self) -> Gauges:
        if self._gauges is None:
            raise CallerError(
                f"{self.name}: its load is not known; create it with InProcessInstance.start, or "
                "give EngineGauges to it and its logger_factory() to AsyncLLM as a stat logger"
            )
        return self._gauges.now()

    async def close(self) -> None:
        """Does nothing: the engine's owner calls `engine.shutdown()`."""

    async def _control(self, what: str, call: Any) -> None:
        try:
            await call
        except Exception as error:  # the engine re-raises any exception of its workers
            raise InstanceError(f"{what} failed: {type(error).__name__}: {error}") from error


def _sampling_params(order: Order) -> Any:
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = dict(order.sampling)
    if sampling.pop("n", 1) != 1:
        raise RequestRejected("an order is for one response: leave n out, send one order for each")
    if not sampling.get("stop"):  # only stop strings need the text
        sampling.setdefault("detokenize", False)
    if order.stream_every:
        sampling["stream_interval"] = order.stream_every
    kind = RequestOutputKind.DELTA if order.stream_every else RequestOutputKind.FINAL_ONLY
    try:
        return SamplingParams(**sampling, max_tokens=order.max_new_tokens, output_kind=kind)
    except (VLLMClientError, TypeError, ValueError) as error:
        raise RequestRejected(f"sampling: {error}", body=str(error).encode()) from error


def _chunk(choice: Any, wants_logprobs: bool) -> Chunk:
    token_ids = list(choice.token_ids)
    logprobs = None
    if wants_logprobs and choice.logprobs is not None:
        pairs = zip(token_ids, choice.logprobs, strict=True)
        logprobs = [_bounded(entry[token].logprob) for token, entry in pairs]
    spans = choice.weight_versions
    versions = None if spans is None else [VersionSpan(s.version, s.start, s.end) for s in spans]
    return Chunk(token_ids, logprobs, choice.finish_reason, versions)


def _bounded(logprob: float) -> float:
    return max(_LOWEST_LOGPROB, logprob)  # _LOWEST_LOGPROB if logprob is NaN


# ------------------------------------------------------------------------------------------
# Runs a vLLM engine in this process step by step, and records the work and time of each step.


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
