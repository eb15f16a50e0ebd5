"""The simulated instance against the real scheduler, step by step.

A real LLMEngine (real scheduler, real KV cache manager, real tiny model, real sampled tokens) and
two simulated ones, the reference step by step and the jumping one, get the same random workload
and must decide the same in every step. See README.md in this folder for what is compared, and for
what cannot be.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import vllm
from packaging.version import Version

from rollout_sched.simulators.instance.model import (
    CostModel,
    Ended,
    InstanceSpec,
    Paused,
    PauseMode,
    SimRequest,
)
from rollout_sched.simulators.instance.sim_instance import SimInstance
from tests.simulators.instance.reference import ReferenceInstance

SEEDS = 40
# Sums of powers of two are exact, so jumping and stepping get the very same times.
COST = CostModel(step_s=2.0**-10, weights_s=0.0, token_s=0.0, context_s=2.0**-30)
OWN_TOKENS = 6  # token ids per stream: texts of different streams must never be equal
FIRST_OWN_TOKEN = 1000
PAUSES: tuple[PauseMode, ...] = ("keep", "abort", "wait")

_runs = itertools.count()


class RealInstance:
    """The doors of a simulated instance, before a real engine with a new scheduler."""

    def __init__(self, engine: Any, spec: InstanceSpec) -> None:
        self.engine = engine
        self.core = engine.engine_core.engine_core
        self.scheduler = self.core.scheduler = _new_scheduler(self.core, spec)
        self.prefix = f"{next(_runs)}-"  # the engine outlives this scheduler and its names
        self.arrivals = 0
        self.decided: Any = None
        self.preempted: list[int] = []
        self.tokens: dict[int, list[int]] = {}
        self.spans: dict[int, list[tuple[int, int]]] = {}
        self.cached: dict[int, int] = {}
        self._spy()

    def _spy(self) -> None:
        schedule, preempt = self.scheduler.schedule, self.scheduler._preempt_request

        def remembering_schedule(*args: Any, **kwargs: Any) -> Any:
            self.decided = schedule(*args, **kwargs)
            return self.decided

        def remembering_preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
            self.preempted.append(self.number(request.request_id))
            return preempt(request, *args, **kwargs)

        self.scheduler.schedule = remembering_schedule
        self.scheduler._preempt_request = remembering_preempt

    def name(self, number: int) -> str:
        return f"{self.prefix}{number}"

    def number(self, name: str) -> int:
        return int(name.removeprefix(self.prefix))

    def submit(self, request: SimRequest, prompt: list[int], own: list[int]) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            max_tokens=min(request.new_tokens, request.max_new_tokens),
            temperature=1.0,
            ignore_eos=True,
            allowed_token_ids=own,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        text: dict[str, Any] = {"prompt_token_ids": prompt}
        if request.salt:
            text["cache_salt"] = str(request.salt)
        self.arrivals += 1
        self.tokens[request.attempt] = []
        name = self.name(request.attempt)
        self.engine.add_request(
            name, text, parameters, arrival_time=float(self.arrivals), priority=request.priority
        )
        return self.scheduler.requests[name]

    def step(self, aborted_within: int | None) -> None:
        self.preempted.clear()
        if aborted_within is not None:  # looked at after the forward pass, before its results
            self.core.aborts_queue.put([self.name(aborted_within)])
        for output in self.engine.step():
            number = self.number(output.request_id)
            self.tokens[number] = list(output.outputs[0].token_ids)
            if output.finished:
                versions = output.outputs[0].weight_versions
                self.spans[number] = [(int(v.version), v.end - v.start) for v in versions]
                self.cached[number] = output.num_cached_tokens
        if aborted_within is not None:
            self.abort(aborted_within)  # for the frontend's books

    def abort(self, number: int) -> None:
        self.engine.abort_request([self.name(number)])

    def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        from vllm.v1.core.sched.interface import PauseState

        if mode == "wait":  # refused by the in-process engine; EngineCoreProc does this
            self.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        else:
            self.core.pause_scheduler(mode=mode, clear_cache=clear_cache)

    def finish_wait(self, clear_cache: bool) -> None:
        self.core._finish_pause(clear_cache)

    def resume(self) -> None:
        self.core.resume_scheduler()

    def set_version(self, version: int, path: Path) -> None:
        self.engine.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        self.core.set_weight_version(str(version))

    def clear_cache(self, preempt: bool) -> None:
        self.core.reset_prefix_cache(reset_running_requests=preempt)

    def can_run(self) -> bool:
        return bool(self.scheduler.get_num_unfinished_requests())

    def flush(self) -> None:
        """Let the worker forget finished requests; schedules nothing."""
        while self.scheduler.has_requests() and not self.can_run():
            self.engine.step()

    def eviction_order(self) -> list[Any]:
        """Hashes of the cached free blocks, next to be evicted first."""
        from vllm.v1.core.kv_cache_utils import get_block_hash

        pool = self.scheduler.kv_cache_manager.block_pool
        hashes = [block.block_hash for block in pool.free_block_queue.get_all_free_blocks()]
        cached = [get_block_hash(h) for h in hashes if h is not None]
        assert not any(hashes[: len(hashes) - len(cached)]), "blank blocks are not in front"
        return cached


def _new_scheduler(core: Any, spec: InstanceSpec) -> Any:
    """A scheduler of the engine's own class with other limits, over the same model and KV."""
    config = copy.copy(core.vllm_config)
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.cache_config = copy.copy(config.cache_config)
    config.scheduler_config.max_num_seqs = spec.max_num_seqs
    config.scheduler_config.max_num_batched_tokens = spec.max_num_batched_tokens
    config.scheduler_config.max_num_scheduled_tokens = None
    config.scheduler_config.policy = spec.scheduling
    config.scheduler_config.watermark = spec.watermark
    config.cache_config.num_gpu_blocks = spec.kv_blocks + 1
    config.cache_config.enable_prefix_caching = spec.prefix_caching
    blocks = copy.copy(core.scheduler.kv_cache_config)
    blocks.num_blocks = spec.kv_blocks + 1
    return type(core.scheduler)(
        vllm_config=config,
        kv_cache_config=blocks,
        structured_output_manager=core.structured_output_manager,
        block_size=spec.block_size,
        hash_block_size=spec.block_size,
        log_stats=False,
    )


@dataclass(eq=False)
class Text:
    """What one stream consists of, over all its attempts."""

    stream: int
    prompt_stream: int
    shared_tokens: int
    salt: int
    own: list[int]
    tokens: list[int]
    computed: int = 0
    resting: bool = False


@dataclass
class Lockstep:
    """Real and simulated, driven alike and compared after every step."""

    real: RealInstance
    spec: InstanceSpec
    models: list[Path]
    now: float = 0.0
    attempts: int = 0
    texts: list[Text] = field(default_factory=list)
    live: dict[int, Text] = field(default_factory=dict)
    requests: dict[int, Any] = field(default_factory=dict)
    labels: dict[Any, tuple[Hashable, int]] = field(default_factory=dict)
    waits: list[bool] = field(default_factory=list)
    paused: bool = False
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.simulated = ReferenceInstance(self.spec)
        self.jumping = SimInstance(self.spec)
        self.said: list[Ended | Paused] = []
        self.said_jumping: list[Ended | Paused] = []

    # Inputs, at a step boundary

    def tell(self, name: str, *arguments: Any) -> None:
        self.seen[name] += 1
        getattr(self.simulated, name)(*arguments)
        getattr(self.jumping, name)(*arguments)

    def submit(self, text: Text, new: int, limit: int, priority: int) -> None:
        request = SimRequest(
            attempt=self.attempts,
            context_tokens=len(text.tokens),
            new_tokens=new,
            max_new_tokens=limit,
            prompt_stream=text.prompt_stream,
            shared_tokens=text.shared_tokens,
            stream=text.stream,
            known_tokens=text.computed,
            salt=text.salt,
            priority=priority,
        )
        self.attempts += 1
        self.tell("submit", request, self.now)
        self.settle()
        self.requests[request.attempt] = self.real.submit(request, text.tokens, text.own)
        self.live[request.attempt] = text
        text.resting = False

    def abort(self, number: int) -> None:
        self.tell("abort", number, self.now)
        self.real.abort(number)
        self.settle()

    def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        self.seen["pause " + mode] += 1
        self.tell("pause", self.now, mode, clear_cache)
        self.real.pause(mode, clear_cache)
        self.paused = True
        if mode == "wait":
            self.waits.append(clear_cache)
        self.settle()

    def resume(self) -> None:
        self.tell("resume", self.now)
        self.real.resume()
        self.paused = False
        self.settle()

    def set_version(self, version: int) -> None:
        self.tell("set_version", version, self.now)
        self.real.set_version(version, self.models[version % 2])
        self.settle()

    def clear_cache(self, preempt: bool) -> None:
        self.tell("clear_cache", self.now, preempt)
        self.real.clear_cache(preempt)
        self.settle()

    # Time

    def can_run(self) -> bool:
        self.real.flush()
        assert self.real.can_run() == self.simulated.can_run()
        self.finish_waits()
        return self.real.can_run()

    def step(self, aborted_within: int | None = None) -> None:
        self.remember_hashes()
        self.go_to(self.simulated.next_at())
        end = self.simulated.step_end
        assert end is not None, "the step should have begun"
        if aborted_within is not None:
            self.tell("abort", aborted_within, (self.now + end) / 2)
            self.seen["aborted within a step"] += 1
        self.go_to(end)
        self.real.step(aborted_within)
        self.finish_waits()
        self.remember_hashes()
        self.compare_decisions()
        self.settle()

    def go_to(self, now: float) -> None:
        self.now = now
        self.said += self.simulated.advance(now)
        self.said_jumping += self.jumping.advance(now)

    def settle(self) -> None:
        """Inputs take effect here and now; who has ended becomes a text to be resumed."""
        self.go_to(self.now)
        for ended in self.said:
            if isinstance(ended, Ended) and ended.attempt in self.live:
                text = self.live.pop(ended.attempt)
                made = self.real.tokens[ended.attempt]
                assert len(made) == ended.tokens == sum(tokens for _, tokens in ended.spans)
                if ended.reason != "abort":
                    assert list(ended.spans) == self.real.spans[ended.attempt]
                    assert ended.cached_tokens == self.real.cached[ended.attempt]
                text.computed = len(text.tokens) + max(0, len(made) - 1)
                text.tokens = text.tokens + made
                text.resting = True
                self.seen["context limit"] += len(text.tokens) == self.spec.max_model_len

    def finish_waits(self) -> None:
        """What EngineCoreProc does with pending pauses as soon as it has nothing to do."""
        if not self.real.can_run():
            for clear_cache in self.waits:
                self.real.finish_wait(clear_cache)
            self.waits.clear()

    # Comparing

    def compare_decisions(self) -> None:
        decided, record, number = self.real.decided, self.simulated.last_step, self.real.number
        assert record is not None
        scheduled = [(number(n), tokens) for n, tokens in decided.num_scheduled_tokens.items()]
        hits = {number(n): tokens for n, tokens in _hits(decided).items()}
        assert scheduled == list(record.scheduled.items())
        assert self.real.preempted == record.preempted
        assert hits == record.hits
        self.compare_state()
        self.seen["steps"] += 1
        self.seen["empty steps"] += not scheduled
        self.seen["preempted"] += len(record.preempted)
        self.seen["found tokens"] += sum(hits.values())
        self.seen["steps with a part of a prefill"] += any(
            r.num_computed_tokens < r.num_tokens - 1 for r in self.real.scheduler.running
        )

    def compare_state(self) -> None:
        scheduler, simulated = self.real.scheduler, self.simulated
        running = [self.real.number(r.request_id) for r in scheduler.running]
        assert running == simulated.running
        assert len(scheduler.waiting) == simulated.gauges().waiting
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert self.spec.kv_blocks - free == simulated.gauges().kv_blocks_used
        evicted = [self.labels[h] for h in self.real.eviction_order()]
        assert evicted == list(simulated.eviction_order())
        progress = simulated.progress(self.now)
        assert progress == {n: len(self.real.tokens[n]) for n in progress}

    def remember_hashes(self) -> None:
        """Which chain and block number a hash stands for, and that it is only one."""
        for number, text in self.live.items():
            shared = text.shared_tokens // self.spec.block_size
            prompt = (text.salt, text.prompt_stream)
            own = (text.salt, text.prompt_stream, shared, text.stream)
            for index, block_hash in enumerate(self.requests[number].block_hashes):
                label = (prompt if index < shared else own, index)
                assert self.labels.setdefault(block_hash, label) == label, "texts collide"

    def compare_jumping(self) -> None:
        assert self.said_jumping == self.said
        jumping, simulated = self.jumping.gauges(), self.simulated.gauges()
        for name in ("steps", "preemptions", "prefill_tokens", "cached_tokens", "kv_blocks_used"):
            assert getattr(jumping, name) == getattr(simulated, name)
        assert jumping.reprefilled_tokens == simulated.reprefilled_tokens
        assert jumping.generated_tokens == simulated.generated_tokens
        assert list(self.jumping.eviction_order()) == list(self.simulated.eviction_order())


def _hits(decided: Any) -> dict[str, int]:
    hits = {r.req_id: r.num_computed_tokens for r in decided.scheduled_new_reqs}
    cached = decided.scheduled_cached_reqs
    for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        if name in cached.resumed_req_ids:
            hits[name] = computed
    return hits


class Workload:
    """Random inputs at random boundaries."""

    def __init__(self, pair: Lockstep, rng: random.Random) -> None:
        self.pair = pair
        self.rng = rng
        size = pair.spec.block_size
        lengths = (0, 2 * size, 2 * size + 5, 3 * size, rng.randrange(1, 5 * size))
        self.prompts = [[rng.randrange(3, FIRST_OWN_TOKEN) for _ in range(n)] for n in lengths]
        self.haste = rng.choice([0.1, 0.35, 0.9])
        self.unrest = rng.choice([0.0, 0.3, 1.0])
        self.left = rng.randrange(15, 45)
        self.version = 0

    def run(self) -> None:
        pair, rng = self.pair, self.rng
        while self.left or pair.live:
            self.act()
            if pair.can_run():
                within = list(pair.live) if rng.random() < 0.02 * self.unrest else []
                pair.step(rng.choice(within) if within else None)
            pair.simulated.check_invariants()
            pair.jumping.check_invariants()
        pair.can_run()
        pair.compare_state()
        pair.compare_jumping()

    def act(self) -> None:
        rng, pair = self.rng, self.pair
        while self.left and rng.random() < self.haste:
            self.left -= 1
            self.submit()
        if pair.live and rng.random() < 0.02 * self.unrest:
            pair.abort(rng.choice(list(pair.live)))
        if rng.random() < 0.01 * self.unrest:
            pair.clear_cache(rng.random() < 0.5)
        if rng.random() < 0.01 * self.unrest:
            self.new_version()
        if pair.paused and rng.random() < 0.3:
            pair.resume()
        elif rng.random() < 0.02 * self.unrest:
            pair.pause(rng.choice(PAUSES), rng.random() < 0.5)
            if rng.random() < 0.5:
                self.new_version()

    def new_version(self) -> None:
        if not self.pair.paused:
            self.pair.seen["live version"] += 1
        self.version += 1
        self.pair.set_version(self.version)

    def submit(self) -> None:
        rng, spec = self.rng, self.pair.spec
        room = min(spec.max_model_len, spec.kv_blocks * spec.block_size)
        resting = [t for t in self.pair.texts if t.resting and len(t.tokens) < room - 30]
        if resting and rng.random() < 0.4:
            text = rng.choice(resting)
            if rng.random() < 0.5:  # an observation
                text.tokens = text.tokens + rng.choices(text.own, k=rng.randrange(1, 60))
        else:
            text = self.new_text()
        context = len(text.tokens)
        if context + 1 < room:
            # With room for more than max_model_len, vLLM's own limit gets its turn.
            new = rng.choice([rng.randrange(1, 150)] * 9 + [400])
            if spec.kv_blocks * spec.block_size < spec.max_model_len:
                new = min(new, room - context)
            limit = rng.choice([new, 1 + new // 2, 500])
            self.pair.submit(text, new, limit, rng.choice([0, 0, 1, 2]))

    def new_text(self) -> Text:
        rng, texts = self.rng, self.pair.texts
        prompt_stream = rng.randrange(len(self.prompts))
        prompt = self.prompts[prompt_stream]
        first = FIRST_OWN_TOKEN + OWN_TOKENS * len(texts)
        own = list(range(first, first + OWN_TOKENS))
        extra = rng.choices(own, k=rng.choice([0, 0, 1, 7, 40]))
        if not prompt and not extra:
            extra = own[:1]
        salt = rng.choice([0, 0, 0, 1])
        text = Text(len(texts), prompt_stream, len(prompt), salt, own, prompt + extra)
        texts.append(text)
        return text


#: vLLM 0.33 goes on to the next request when the least urgent one has preempted itself, where 0.32
#: ends the step, as the simulated instance does.
ENDS_THE_STEP = Version(vllm.__version__) < Version("0.33")


def random_spec(rng: random.Random) -> InstanceSpec:
    slots = rng.choice([2, 4, 8, 16])
    return InstanceSpec(
        cost=COST,
        kv_blocks=rng.randrange(10, 31),
        block_size=32,
        max_num_seqs=slots,
        max_num_batched_tokens=rng.choice([slots, slots + 20, 64, 1024]),
        max_model_len=512,
        prefix_caching=rng.random() < 0.85,
        scheduling=rng.choice(["fcfs", "priority" if ENDS_THE_STEP else "fcfs"]),
        watermark=rng.choice([0.0, 0.0, 0.05]),
    )


def run_lockstep(engine: Any, models: list[Path], seed: int) -> Counter[str]:
    """One random workload on one random instance; returns what it has met."""
    rng = random.Random(seed)
    spec = random_spec(rng)
    pair = Lockstep(RealInstance(engine, spec), spec, models)
    pair.real.set_version(0, models[0])
    Workload(pair, rng).run()
    return pair.seen


@pytest.mark.skipif(not ENDS_THE_STEP, reason="vLLM 0.33 runs the next request instead")
def test_the_first_in_line_preempts_itself(engine: Any, models: list[Path]) -> None:
    """The least urgent runs first and finds no block: vLLM makes a step of no tokens."""
    spec = InstanceSpec(
        COST, 10, 32, max_num_seqs=4, max_num_batched_tokens=512, scheduling="priority"
    )
    pair = Lockstep(RealInstance(engine, spec), spec, models)
    pair.real.set_version(0, models[0])
    for stream, (context, priority) in enumerate([(127, 2), (161, 0)]):
        own = list(range(FIRST_OWN_TOKEN + 9 * stream, FIRST_OWN_TOKEN + 9 * stream + 9))
        pair.texts.append(Text(stream, stream, 0, 0, own, (own * 20)[:context]))
        pair.submit(pair.texts[-1], 20, 20, priority)
        pair.step()
    while pair.live:
        pair.step()
    pair.compare_jumping()
    assert pair.seen["empty steps"] == 1


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    return Counter()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_step_decides_as_vllm_does(
    engine: Any, models: list[Path], seed: int, seen: Counter[str]
) -> None:
    seen.update(run_lockstep(engine, models, seed))


def test_the_workloads_met_everything(seen: Counter[str]) -> None:
    """A comparison that never preempts proves nothing about preemption."""
    if seen["submit"] < 10 * SEEDS:
        pytest.skip("not all workloads were run")
    print(dict(seen))
    for name in (
        "steps",
        "preempted",
        "found tokens",
        "steps with a part of a prefill",
        "abort",
        "aborted within a step",
        "pause keep",
        "pause abort",
        "pause wait",
        "resume",
        "set_version",
        "live version",
        "context limit",
        "clear_cache",
    ):
        assert seen[name] > 0, name
