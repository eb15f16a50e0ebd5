"""The headlines of the literature that the closed loop can express, and those that it cannot.

A claim is a ratio of two arms. Each arm is a policy on a workload in a world, the nearest that we
have to what was measured. Nothing is tuned to reproduce a claim: lengths, fleets and batches are
taken from the papers and projects as far as known, the rest from the shipped scenarios.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.cells import Cell, Lengths
from benchmarks.ratios import Measure

HERE = Path(__file__).parent / "reproduction"


class Claim(msgspec.Struct, frozen=True):
    """A published claim, and the two arms that reproduce it here: baseline and system.

    measure  "total" seconds, "rollout" seconds a step, "tokens" accepted in a second, or the
             "bubble" of the rollout; the ratio is above 1 if the system is better
    word     what is like the source here and what is not, and so why the ratios differ
    """

    system: str
    headline: str
    measure: Measure
    baseline: Cell
    arm: Cell
    word: str


def scenario(name: str) -> str:
    return str(HERE / "scenarios" / f"{name}.toml")


def policy(name: str) -> str:
    """A variant of a preset that only one claim needs."""
    return str(HERE / "policies" / f"{name}.toml")


def rollpacker(cap: int, groups: int) -> Lengths:
    """The longest is 25-32 times the median, as they report; siblings are as similar as usual."""
    return Lengths(groups, 8, cap / 28, 0.89, 0.51, cap)


def _pair(
    system: str,
    headline: str,
    measure: Measure,
    policies: tuple[str, str],
    worlds: tuple[Cell, Cell],
    word: str,
) -> Claim:
    before, after = (
        msgspec.structs.replace(world, policy=name)
        for world, name in zip(worlds, policies, strict=True)
    )
    return Claim(system, headline, measure, before, after, word)


def _in(world: str, trace: str | Lengths, **job: int) -> tuple[Cell, Cell]:
    """Both arms in the same world."""
    cell = Cell("", trace, world, **job)
    return cell, cell


MATHS = "composite_math_512x8"
#: Two passes over the prompts, all eight samples each time.
TWICE = {"epochs": 2, "samples_per_prompt": 8}
AGENTS = "composite_tau_256x8"
STATIC = "static_split"
SYNC = "round_robin_sync"
SMALL, LARGE = "qwen7b-8xh100", "qwen32b-16xh100"
SMALL_APART, LARGE_APART = f"{SMALL}-disaggregated", f"{LARGE}-disaggregated"

#: Qwen2.5-Math-7B under DAPO, up to 28k: the mean (1.65k with the prompt) follows from the
#: published seconds of training at 40 % MFU, the spread is the usual one.
VERL = Lengths(2048, 16, 900.0, 0.8, 0.6, 28_672)
COLOCATED = Cell("", VERL, scenario("qwen7b-8xh20"))
APART = Cell("", VERL, scenario("qwen7b-8xh20-half"))
#: The same up to 20k, mean 0.7k.
ONE_OFF = Lengths(4096, 16, 320.0, 0.8, 0.6, 20_480)
BEFORE = Cell("", ONE_OFF, scenario("qwen7b-16xh20"))
AFTER = Cell("", ONE_OFF, scenario("qwen7b-16xh20-quarter"))
#: Qwen2-VL-72B in Seer: mean 7.6k, at most 40k.
SEER = Lengths(600, 16, 5100.0, 0.7, 0.55, 40_960)

_ROLLPACKER = (
    "RollPacker's lengths are known only by shape (longest 25-32 x the median, a quarter above "
    "about 1k of 16k). Its baseline splits statically, as veRL did. A policy that takes the first "
    "responses of a prompt takes shorter ones and trains them sooner; that is part of the ratio. "
    "Our ratio grows less with the model, because our small models have as long a tail as our "
    "large one."
)

CLAIMS = (
    _pair(
        "RollPacker, tail batching alone, 7B 8k",
        "1.30x veRL",
        "total",
        (STATIC, "tail_batching"),
        _in(scenario("qwen7b-16xh800"), rollpacker(8192, 2048)),
        _ROLLPACKER,
    ),
    _pair(
        "RollPacker, tail batching alone, 14B 16k",
        "1.48x veRL",
        "total",
        (STATIC, "tail_batching"),
        _in(scenario("qwen14b-32xh800"), rollpacker(16_384, 2048)),
        _ROLLPACKER,
    ),
    _pair(
        "RollPacker, tail batching alone, 32B 32k",
        "2.21x veRL",
        "total",
        (STATIC, "tail_batching"),
        _in(scenario("qwen32b-64xh800"), rollpacker(32_768, 2048)),
        _ROLLPACKER,
    ),
    _pair(
        "RollPacker, stream trainer beside tail batching, 14B",
        "1.10x (2.22x for 2.02x)",
        "total",
        ("tail_batching", policy("tail_batching_fused")),
        _in(scenario("qwen14b-32xh800"), rollpacker(16_384, 2048)),
        "RollPacker's GPUs change to training when 20-50 % of the responses are done, by a memory "
        "forecast; here when 80 % of the prompts are done, if that hardly slows the rest down.",
    ),
    _pair(
        "Seer, divided rollout and context, 72B",
        "1.56x veRL (rollout)",
        "rollout",
        (STATIC, "seer"),
        _in(scenario("qwen72b-64xh800"), SEER),
        "Seer's chunks move without a prefill, through a global KV pool; here each move costs a "
        "prefill. Without speculative decoding (their 2.04x), whose acceptance would be an input.",
    ),
    _pair(
        "StreamRL, one-step asynchronous",
        "up to 2.66x verl",
        "total",
        (STATIC, "streamrl"),
        (Cell("", MATHS, LARGE, **TWICE), Cell("", MATHS, LARGE_APART, **TWICE)),
        "The headline is the maximum of several settings, whose fleets are allocated by a "
        "profile; here a fixed quarter of the GPUs trains. The length split itself costs more "
        "than it gains here (docs/zoo.md, compare one_step_off), as Seer found with true lengths "
        "(0.94-0.99x).",
    ),
    _pair(
        "verl fully async, mode d, 32 GPUs",
        "2.66x colocated verl",
        "total",
        (STATIC, "fully_async_d"),
        (COLOCATED, APART),
        "A quarter of the fleet and of the batch; lengths by their mean. The training seconds are "
        "the published ones. So part of the gain (the old log-probs are not computed any more) is "
        "an input, not a result.",
    ),
    _pair(
        "verl fully async, mode b (stream only), 128 GPUs",
        "about 1.6x colocated verl",
        "total",
        (STATIC, "fully_async_b"),
        (COLOCATED, APART),
        "As mode d; the headline was measured at 128 GPUs. Between two synchronisations the steps "
        "are sorted by length, here as in verl.",
    ),
    _pair(
        "verl fully async, threshold 0.1 for 0",
        "1.35x (231 to 171 s a step)",
        "total",
        ("fully_async_b", policy("fully_async_01")),
        (APART, APART),
        "The same trainer on both sides: the ratio shows the effect of a little staleness alone. "
        "Here 0.1 only fills the gap after a synchronisation; in verl interruption came with it.",
    ),
    _pair(
        "verl fully async, threshold 0.5 for 0",
        "1.53x (231 to 151 s a step)",
        "total",
        ("fully_async_b", "fully_async_d"),
        (APART, APART),
        "As above; in verl 0.3 was as good (1.58x).",
    ),
    _pair(
        "verl one-step-off",
        "1.23x (FSDP2), 1.40x (Megatron)",
        "total",
        (STATIC, "one_step_off"),
        (BEFORE, AFTER),
        "4 GPUs generate and 12 train, as in verl; lengths by their mean, training seconds as "
        "published. Generation took 321 s of a step in verl and takes 130 here, so there is less "
        "to overlap. By verl's own seconds per step the two headlines are 1.44x and 1.23x.",
    ),
    _pair(
        "AReaL, interruptible generation, 7B",
        "1.17x (tokens/s)",
        "tokens",
        (policy("areal_drain"), "areal"),
        _in(SMALL_APART, MATHS, **TWICE),
        "The shipped disaggregated 7B scenario; its trainer is the bottleneck and hides the gain "
        "of the fleet.",
    ),
    _pair(
        "AReaL, interruptible generation, 32B",
        "1.12x (1.5B), 1.17x (7B)",
        "tokens",
        (policy("areal_drain"), "areal"),
        _in(LARGE_APART, MATHS, **TWICE),
        "As above, with the larger model, where generation is closer to being the bottleneck.",
    ),
    _pair(
        "AReaL, end to end",
        "up to 2.77x synchronous",
        "total",
        (STATIC, "areal"),
        (Cell("", MATHS, LARGE, **TWICE), Cell("", MATHS, LARGE_APART, **TWICE)),
        "Here: time for the same number of steps with the same number of samples. The headline is "
        "hours to a number of steps on hundreds of GPUs.",
    ),
    _pair(
        "AsyncFlow",
        "1.59x in the mean",
        "total",
        (STATIC, "asyncflow"),
        (Cell("", MATHS, SMALL, **TWICE), Cell("", MATHS, SMALL_APART, **TWICE)),
        "AsyncFlow runs on NPUs and has a data plane, which is not modelled: here moving samples "
        "costs nothing.",
    ),
    _pair(
        "APRIL",
        "1.17x, 1.21x, 1.35x synchronous slime",
        "tokens",
        (SYNC, "april"),
        _in(SMALL, MATHS, prompts_per_step=32),
        "A 4B model on AMD GPUs in APRIL, 7B on H100 here; 32 prompts of 64 started in both. The "
        "tail of our trace, capped at 32k, is heavier than that of answers with a lower cap.",
    ),
    _pair(
        "CoPRIS",
        "1.58-1.94x synchronous",
        "total",
        (SYNC, "copris"),
        _in(SMALL, MATHS, **TWICE),
        "64 prompts x 8 at 1,024 requests, as in CoPRIS.",
    ),
    _pair(
        "Laminar",
        "2.56x verl in the mean",
        "total",
        (STATIC, "laminar"),
        (Cell("", MATHS, LARGE, **TWICE), Cell("", MATHS, LARGE_APART, **TWICE)),
        "Laminar uses up to 1,024 GPUs, where the tail of a batch is longer and the barrier costs "
        "more.",
    ),
    _pair(
        "Laminar, repack",
        "1.26x (tokens/s of generation)",
        "tokens",
        (policy("laminar_stay"), "laminar"),
        _in(LARGE_APART, MATHS, **TWICE),
        "In Laminar weights come from relays at any time; here a third of the fleet is drained at "
        "a time, and on six instances repack finds almost nothing to empty.",
    ),
    _pair(
        "ROLL Flash, asynchronous ratio 2",
        "2.24x synchronous ROLL",
        "total",
        (STATIC, policy("roll_flash")),
        (Cell("", MATHS, LARGE, **TWICE), Cell("", MATHS, LARGE_APART, **TWICE)),
        "ROLL Flash's queue of redundant prompts and environments is not included.",
    ),
    _pair(
        "SortedRL, bubble ratio",
        "less than half",
        "bubble",
        (SYNC, "sorted_rl"),
        _in(SMALL, MATHS, **TWICE),
        "Vacant places of a batch while anything runs, as in SortedRL. Here whole groups are "
        "sorted, which have to wait for their longest sample.",
    ),
    _pair(
        "RhymeRL, history pipeline",
        "2.6x with speculative decoding",
        "total",
        (SYNC, "rhyme"),
        _in(SMALL, MATHS, epochs=2),
        "Only the pipeline, without speculative decoding from history, whose acceptance would be "
        "an input. Half of the run is a first epoch, without history; the second trains other "
        "samples.",
    ),
    _pair(
        "ThunderAgent, 512 sessions",
        "2.40x verl's balancer (rollout)",
        "rollout",
        (policy("verl_balancer"), "session_thrash_control"),
        _in(scenario("agents-8xh20"), AGENTS, prompts_per_step=64),
        "ThunderAgent's sessions reach 100k tokens; ours are shorter, so the KV cache is made "
        "smaller: 256 sessions fit.",
    ),
    _pair(
        "ThunderAgent, 256 sessions",
        "1.0x (parity below saturation)",
        "rollout",
        (policy("verl_balancer"), "session_thrash_control"),
        _in(scenario("agents-8xh20"), AGENTS, prompts_per_step=32),
        "As above, but all sessions fit.",
    ),
    _pair(
        "Affinity (cache-aware router, NeMo-RL PR 3663)",
        "1.12x (makespan of 600 sessions)",
        "rollout",
        (SYNC, policy("verl_balancer")),
        _in(SMALL, AGENTS, prompts_per_step=75, steps=3),
        "600 sessions at a time, as in the PR, but of other lengths; affinity by session.",
    ),
    _pair(
        "DPLB (vendor's claim; UniRL #40: single digits)",
        "about 1.3x, unverified",
        "total",
        (STATIC, "dplb"),
        _in(SMALL, MATHS, **TWICE),
        "Against a static split. The result agrees with UniRL's.",
    ),
    _pair(
        "vLLM's internal balancer",
        "no figure",
        "total",
        (STATIC, "vllm_internal_lb"),
        _in(SMALL, MATHS, **TWICE),
        "For comparison: the balancing of `--data-parallel-size`.",
    ),
)

#: Headline -> the reason why the closed loop cannot express it.
NOT_EXPRESSED = {
    "RollPacker end to end, 2.03-2.56x": "most of the gain beyond tail batching comes from the "
    "reward scheduler (rewards are not modelled) and from tensor parallelism chosen per step (the "
    "cost constants of an instance are fixed).",
    "RLHFuse, 1.4-2.4x ReaLHF": "RLHFuse fuses the tail with inference of reference, reward and "
    "critic models, and with a pipeline schedule; the trainer model here is one step. "
    "`stage_fusion` fuses the training step instead.",
    "TransferQueue, +49 %": "a data plane; here moving samples costs nothing.",
    "PipelineRL, about 2x learning speed": "learning is not modelled, only time and staleness; "
    "its mechanism is `magistral`.",
    "LlamaRL, 10.7x": "against a baseline like DeepSpeed-Chat on a 405B model, whose cost "
    "constants are not known.",
    "TLT, 1.7-2.1x": "a scenario's `[speculation]` has the drafts, but their acceptance is an "
    "input, and so is the ratio: `rollout-sched speculate` shows it for any acceptance. Training "
    "the drafter in the tail's idle time is not modelled.",
    "Heddle, up to 2.5x": "only its abstract is known.",
    "StaleFlow, 1.42-2.68x": "a protocol between servers; `bounded` does the same as its "
    "reservation for every policy here.",
    "RLinf/DynaRL, up to 1.98x": "GPUs change between training and generation during a run.",
    "SkyRL sticky least-loaded, group latency -46 % at p90": "against consistent hashing, which "
    "no policy here uses.",
    "Dynamo's KV router, -7.3 % a token": "a router's cost per token; for affinity see above.",
}
