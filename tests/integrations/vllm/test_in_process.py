"""What the steps of an engine were, read off its scheduler; tests/vllm has a real one."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.vllm.in_process import EngineStep, SteppedEngine

BUDGET = 10


class Engine:
    """The doors of vLLM's LLMEngine, and a scheduler that prefills and decodes."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self._known: set[str] = set()
        core = SimpleNamespace(scheduler=self)
        self.engine_core = SimpleNamespace(engine_core=core)
        config = {
            "scheduler_config": SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=BUDGET),
            "model_config": SimpleNamespace(max_model_len=100),
            "cache_config": SimpleNamespace(
                num_gpu_blocks=8, block_size=16, enable_prefix_caching=True
            ),
        }
        self.vllm_config = SimpleNamespace(**config)

    def add_request(self, name: str, request: dict[str, Any], params: Any) -> None:
        prompt = len(request["prompt_token_ids"])
        self.requests[name] = SimpleNamespace(
            num_computed_tokens=0, num_prompt_tokens=prompt, end=prompt + params.max_tokens - 1
        )

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def schedule(self) -> Any:
        budget, tokens = BUDGET, {}
        for name, request in self.requests.items():
            left = max(1, request.num_prompt_tokens - request.num_computed_tokens)
            if took := min(left, budget):
                tokens[name] = took
                budget -= took
                request.num_computed_tokens += took
        new = [name for name in tokens if name not in self._known]
        self._known.update(tokens)
        return SimpleNamespace(num_scheduled_tokens=tokens, scheduled_new_reqs=new)

    def step(self) -> None:
        self.engine_core.engine_core.scheduler.schedule()
        ended = [n for n, r in self.requests.items() if r.num_computed_tokens == r.end]
        for name in ended:
            del self.requests[name]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SteppedEngine:
    vllm = SimpleNamespace(SamplingParams=lambda **told: SimpleNamespace(**told), __version__="9")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    ticks = iter(range(1000))
    return SteppedEngine(Engine(), clock=lambda: float(next(ticks)))


def test_steps_of_a_burst(engine: SteppedEngine) -> None:
    assert engine.burst([[5] * 6, [6] * 6], [2, 2], {"temperature": 1.0}) == [
        EngineStep(0, 10, 0, 6 * 3 + 4 * 2, 2, 1.0),
        EngineStep(1, 2, 7, 2 * (4 + 1), 0, 1.0),
        EngineStep(1, 0, 7, 0.0, 0, 1.0),
    ]


def test_an_in_process_engine_describes_itself(engine: SteppedEngine) -> None:
    assert (engine.slots, engine.max_model_len, engine.kv_tokens) == (4, 100, 128)
    limits = engine.limits
    assert (limits.block_size, limits.prefix_caching, limits.max_num_batched_tokens) == (
        16,
        True,
        BUDGET,
    )


def test_a_missing_vllm_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "vllm.engine", None)
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", None)
    with pytest.raises(CallerError, match="vLLM is not installed in this environment"):
        SteppedEngine.start("m", {})
