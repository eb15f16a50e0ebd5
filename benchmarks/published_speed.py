"""Tokens/s that `scenarios guess` predicts beside those that others have published:
`python -m benchmarks.published_speed` prints a table.

Each row is one server with requests of one length, so many at a time, on the simulated instance
with guessed constants. Nothing in the formula was fitted to these rows, so none may be left out
because it is far off. Requests of ShareGPT count with their mean lengths. Weights of 8 and 4 bits
are multiplied in bf16 (the guess knows weights alone to be quantised), so prefill of servers that
multiply in 8 bits is predicted too slow.
"""

from __future__ import annotations

from itertools import count
from statistics import median
from typing import Any, NamedTuple

from rollout_sched.simulators.guess import formula
from rollout_sched.simulators.guess.architecture import model_named
from rollout_sched.simulators.guess.formula import Layout, Precision, gpu_named
from rollout_sched.simulators.instance import Ended, InstanceSpec, SimInstance, SimRequest

ORACLE = (
    "[Oracle](https://blogs.oracle.com/cloud-infrastructure/"
    "serving-llama-31-405b-model-with-amd-mi300x-gpus)"
)
LAMBDA = "[Lambda](https://lambda.ai/inference-models/minimaxai/minimax-m2.5)"
VULTR = "[Vultr](https://docs.vultr.com/inference-cookbook/cuda/dynamo/dynamo-executive-summary)"
MUSGRAVE = "[Musgrave](https://johnmusgrave.com/p/vllm-throughput-latency-sweep-on)"


class Published(NamedTuple):
    """A measured server.

    concurrency  requests at a time; the server's max_num_seqs, if all are sent at once
    requests     in total
    tokens_per_s output tokens
    """

    model: str
    gpu: str
    tp: int
    weights: Any
    concurrency: int
    requests: int
    prompt: int
    response: int
    tokens_per_s: float
    engine: str
    source: str


def _lab(page: str) -> str:
    return f"[GPUStack](https://docs.gpustack.ai/latest/performance-lab/{page})"


Name = tuple[str, str, int, Any]


def _burst(name: Name, response: int, tokens_per_s: float, engine: str, page: str) -> Published:
    """500 prompts of 4,000 tokens at once; vLLM runs 1,024 of them, 256 on an A100 and an NPU."""
    most = 256 if name[1] in ("a100", "910b") else 500
    return Published(*name, most, 500, 4000, response, tokens_per_s, engine, _lab(page))


def _four(name: Name, tokens_per_s: float, engine: str, page: str) -> Published:
    """100 requests of ShareGPT, four at a time."""
    return Published(*name, 4, 100, 230, 217, tokens_per_s, engine, _lab(page))


def _users(name: Name, users: int, prompt: int, each: float, page: str) -> Published:
    """So many users at a time, with so many tokens/s each; responses of 1,024 tokens."""
    link = f"[InferenceX](https://inferencex.semianalysis.com/compare/{page})"
    return Published(*name, users, 4 * users, prompt, 1024, users * each, "its best", link)


QWEN_8B, OSS_120B, OSS_2 = (
    ("qwen3-8b", "h100", 1, "bf16"),
    ("gpt-oss-120b", "h100", 1, "fp4"),
    ("gpt-oss-120b", "h100", 2, "fp4"),
)
R1, GLM = ("deepseek-r1", "h200", 8, "fp8"), ("glm-4.6", "h200", 8, "bf16")
A3B = ("qwen3-30b-a3b", "910b", 2, "bf16")
A22B = "qwen3-235b-a22b"
LLAMA = ("llama-3.1-405b", "mi300x", 8, "fp8")
ASCEND = "vLLM-Ascend 0.9.1"

ROWS = [
    _four(QWEN_8B, 496.9, "vLLM 0.11", "qwen3-8b/h100-latency"),
    _four(OSS_120B, 453.0, "vLLM 0.10.2", "gpt-oss-120b/h100"),
    _four(OSS_2, 645.6, "vLLM 0.10.2", "gpt-oss-120b/h100"),
    _four(R1, 196.8, "vLLM 0.11", "deepseek-r1/h200"),
    _four(GLM, 211.4, "vLLM 0.11", "glm-4.6/h200"),
    _four(A3B, 32.2, ASCEND, "qwen3-30b-a3b/910b"),
    _burst(("qwen3-8b", "910b", 1, "bf16"), 200, 365.4, ASCEND, "qwen3-8b/910b"),
    _burst(A3B, 200, 279.6, ASCEND, "qwen3-30b-a3b/910b"),
    _burst(A3B, 200, 636.3, "MindIE 2.1", "qwen3-30b-a3b/910b"),
    _burst(("qwen3-14b", "h100", 1, "bf16"), 200, 438.6, "vLLM 0.11", "qwen3-14b/h100"),
    _burst(("qwen3-32b", "h100", 1, "bf16"), 200, 102.3, "vLLM 0.11", "qwen3-32b/h100"),
    _burst(("qwen3-32b", "a100", 1, "bf16"), 200, 87.5, "vLLM 0.11", "qwen3-32b/a100"),
    _burst((A22B, "h100", 8, "bf16"), 184, 931.2, "vLLM 0.11", f"{A22B}/h100"),
    _burst((A22B, "h100", 4, "fp8"), 182, 717.6, "vLLM 0.11", f"{A22B}/h100"),
    _burst((A22B, "a100", 8, "bf16"), 183, 357.3, "vLLM 0.11", f"{A22B}/a100"),
    _burst(("gpt-oss-20b", "a100", 1, "fp4"), 107, 415.6, "vLLM 0.11", "gpt-oss-20b/a100"),
    _burst(OSS_120B, 134, 463.4, "vLLM 0.10.2", "gpt-oss-120b/h100"),
    _burst(OSS_2, 136, 1135.3, "vLLM 0.10.2", "gpt-oss-120b/h100"),
    _burst(("glm-4.5-air", "h100", 4, "bf16"), 200, 1033.6, "vLLM 0.11", "glm-4.5-air/h100"),
    _burst(GLM, 200, 794.5, "vLLM 0.11", "glm-4.6/h200"),
    _burst(R1, 200, 753.7, "vLLM 0.11", "deepseek-r1/h200"),
    Published("llama-3.1-8b", "a100-40g", 1, "bf16", 1, 4, 1024, 128, 75.0, "vLLM 0.23", MUSGRAVE),
    Published(*LLAMA, 1, 1, 128, 128, 36.0, "vLLM", ORACLE),
    Published(*LLAMA, 32, 32, 128, 128, 798.0, "vLLM", ORACLE),
    Published(*LLAMA, 256, 256, 128, 128, 1846.0, "vLLM", ORACLE),
    _users(("deepseek-r1", "mi300x", 8, "fp8"), 30, 8192, 23.0, "deepseek-r1-b200-vs-mi300x"),
    _users(("deepseek-r1", "mi325x", 8, "fp8"), 33, 8192, 25.0, "deepseek-r1-b200-vs-mi325x"),
    _users(("gpt-oss-120b", "mi325x", 4, "fp4"), 31, 1024, 86.0, "gptoss-120b-b200-vs-mi325x"),
    Published("minimax-m2.5", "h100", 4, "fp8", 32, 128, 8192, 1024, 849.0, "SGLang", LAMBDA),
    Published("minimax-m2.5", "b200", 2, "fp8", 32, 128, 8192, 1024, 896.0, "SGLang", LAMBDA),
    Published("minimax-m2.5", "b200", 4, "fp8", 512, 1024, 2048, 512, 8838.0, "vLLM 0.12", VULTR),
]


def predicted(row: Published) -> float:
    """Output tokens/s of the simulated instance."""
    gpu, model, precision = gpu_named(row.gpu), model_named(row.model), Precision(row.weights)
    layout = Layout(2 * row.tp, row.tp, trainer_gpus=row.tp)
    fleet = formula.scenario(gpu, model, layout, precision)["fleet"]
    instance = SimInstance(
        InstanceSpec(
            cost=formula.cost(gpu, model, layout, precision),
            kv_blocks=fleet["kv_tokens"] // 16,
            max_num_seqs=max(1, row.concurrency),
            max_num_batched_tokens=8192,
            prefix_caching=False,
        )
    )
    numbers = count()

    def submit(now: float) -> None:
        n = next(numbers)
        if n < row.requests:
            instance.submit(SimRequest(n, row.prompt, row.response, row.response, n, 0, n), now)

    for _ in range(row.concurrency):
        submit(0.0)
    ended, now = 0, 0.0
    while ended < row.requests:
        now = instance.next_at()
        for outcome in instance.advance(now):
            ended += isinstance(outcome, Ended)
            submit(now)
    return row.requests * row.response / now


def table() -> str:
    """Markdown, with a line about the errors."""
    lines = [
        "| model, weights | served by | requests at a time, prompt + response "
        "| published tokens/s | predicted | error | source |",
        "|---|---|---|---|---|---|---|",
    ]
    errors: dict[bool, list[float]] = {False: [], True: []}
    for row in ROWS:
        guess = predicted(row)
        error = guess / row.tokens_per_s - 1
        errors[model_named(row.model).experts > 0].append(error)
        lines.append(
            f"| {row.model}, {row.weights} | {row.tp} {row.gpu}, {row.engine} "
            f"| {row.concurrency}, {row.prompt:,} + {row.response:,} | {row.tokens_per_s:,.0f} "
            f"| {guess:,.0f} | {error:+.0%} | {row.source} |"
        )
    every = errors[False] + errors[True]
    lines += [
        "",
        f"{len({row.model for row in ROWS})} models, {len({row.gpu for row in ROWS})} "
        f"accelerators. The error is {median(errors[False]):+.0%} in the median for dense models, "
        f"{median(errors[True]):+.0%} for mixtures of experts; "
        f"{sum(abs(error) <= 0.25 for error in every)} of {len(every)} rows are within 25 %.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
