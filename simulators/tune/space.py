"""The search space: for every role the policies worth trying, their values, and conditions.

`SPACE` is a table with all knowledge about the space; `candidates.py` reads it. Everything that a
policy file can set is in it or, with the reason, in `LEFT_OUT` of a test, which compares the two
with `config.REGISTRY`, so that a new policy or parameter is not forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rollout_sched.config import DEFAULTS

#: A policy file as nested tables: role -> {"use": ..., parameter: value}.
Table = Mapping[str, Mapping[str, Any]]


class Setting(msgspec.Struct, frozen=True):
    """What conditions depend on: the job, the fleet, and the user's limits.

    prompts_per_step, samples_per_prompt  of the job
    max_tokens      the cap of a response
    instances       in the fleet
    slots           sequences that the whole fleet runs at once
    disaggregated   the trainer has GPUs of its own
    multi_turn      some samples are trajectories
    max_staleness   the user's bound, versions
    context_s       seconds that a token in the KV cache adds to a decode step
    prefill_tokens_per_s  of an instance
    weights_tokens  tokens of context that take as long to read as the weights
    remembers       prompts are repeated, so that their earlier lengths are known
    """

    prompts_per_step: int
    samples_per_prompt: int
    max_tokens: int
    instances: int
    slots: int
    disaggregated: bool
    multi_turn: bool
    max_staleness: int
    context_s: float
    prefill_tokens_per_s: float
    weights_tokens: float
    remembers: bool


class Condition(msgspec.Struct, frozen=True):
    """`text` completes "only if"."""

    text: str
    holds: Callable[[Setting], bool]


ALWAYS = Condition("", lambda setting: True)
STALENESS = Condition("staleness is allowed", lambda s: s.max_staleness >= 1)
SEVERAL_INSTANCES = Condition("there are several instances", lambda s: s.instances >= 2)
SHARED_AND_SEVERAL = Condition(
    "trainer and several instances share GPUs",
    lambda s: s.instances >= 2 and not s.disaggregated,
)
TRAINS_EARLY = Condition(
    "the trainer has GPUs of its own, or may be lent some",
    lambda s: s.disaggregated or s.instances >= 2,
)
SEVERAL_TURNS = Condition("samples have several turns", lambda s: s.multi_turn)
MOVES = Condition(
    "requests come back to the scheduler: between turns, or interrupted",
    lambda s: s.multi_turn or s.max_staleness >= 1,
)
REMEMBERS = Condition("prompts come again", lambda s: s.remembers)
SEVERAL_SAMPLES = Condition("prompts have several samples", lambda s: s.samples_per_prompt >= 2)
STALE_AND_SEVERAL = Condition(
    "staleness is allowed and there are several instances",
    lambda s: s.max_staleness >= 1 and s.instances >= 2,
)


class MultiplesOfSetting(msgspec.Struct, frozen=True):
    """Integers: these multiples of a field of the setting."""

    field: str
    factors: tuple[float, ...]

    def values(self, setting: Setting) -> list[int]:
        return list(dict.fromkeys(round(f * getattr(setting, self.field)) for f in self.factors))


class RangeToSetting(msgspec.Struct, frozen=True):
    """Integers from 1 to a field of the setting: all up to 4, then powers of two."""

    field: str

    def values(self, setting: Setting) -> list[int]:
        most = getattr(setting, self.field)
        steps = [1, 2, 3, 4, *(2**k for k in range(3, 17))]
        return [*(step for step in steps if step < most), most]


class FixedSetting(msgspec.Struct, frozen=True):
    """A fixed value, taken from the setting."""

    field: str

    def values(self, setting: Setting) -> list[Any]:
        return [getattr(setting, self.field)]


class Parameter(msgspec.Struct, frozen=True):
    """Values to try, similar ones adjacent. If `when` does not hold, it keeps its default."""

    choices: tuple[Any, ...] | MultiplesOfSetting | RangeToSetting | FixedSetting
    when: Condition = ALWAYS

    def values(self, setting: Setting) -> list[Any]:
        return (
            list(self.choices) if isinstance(self.choices, tuple) else self.choices.values(setting)
        )


class Option(msgspec.Struct, frozen=True):
    """A policy for a role.

    `needs`: one of these (role, policy) is required, else it has no effect or is refused. `bars`:
    with any of these it has no effect or is refused. Both name earlier roles of the table.
    `reads_polls`: it uses what instances report when they are polled.
    """

    use: str
    parameters: dict[str, Parameter] = {}
    when: Condition = ALWAYS
    needs: tuple[tuple[str, str], ...] = ()
    bars: tuple[tuple[str, str], ...] = ()
    reads_polls: bool = False

    def fits(self, setting: Setting, table: Table) -> bool:
        """`table`: the policies of the roles before this one."""
        chosen = {(role, row["use"]) for role, row in table.items()}
        needed = not self.needs or not chosen.isdisjoint(self.needs)
        return needed and chosen.isdisjoint(self.bars) and self.when.holds(setting)

    def keys(self, setting: Setting) -> dict[str, list[Any]]:
        """The parameters to choose, with their values."""
        return {
            key: parameter.values(setting)
            for key, parameter in self.parameters.items()
            if parameter.when.holds(setting)
        }


#: The policies that use expected lengths.
READS_LENGTHS = (
    ("ordering", "longest_first"),
    ("ordering", "shortest_first"),
    ("routing", "length_split"),
    ("admission", "kv_tokens"),
    ("admission", "kv_growth"),
    ("routing", "least_tokens"),
    ("routing", "group_tokens"),
)
#: The policies that have no effect without expected lengths.
LIVES_BY_LENGTHS = READS_LENGTHS[:3]

#: The policies that leave work over, which grows stale; without them the bound has no effect.
CARRIES_OVER = (
    ("batching", "one_step_off"),
    ("batching", "fully_async"),
    ("interruption", "partial"),
)

#: Groups of a part of a batch, 0 for whole batches. Only a trainer with GPUs takes parts.
PARTS = {
    "part_prompts": Parameter(
        MultiplesOfSetting("prompts_per_step", (0, 0.0625, 0.125, 0.25, 0.5)), TRAINS_EARLY
    )
}

#: By role, in the order of choice; the first policy of a role is the plainest.
SPACE: dict[str, tuple[Option, ...]] = {
    "batching": (
        Option(
            "sync",
            {"over_prompts": Parameter((1.0, 1.0625, 1.125, 1.25, 1.375, 1.5, 2.0)), **PARTS},
        ),
        Option(
            "tail_batching",
            {
                "over_prompts": Parameter((1.0, 1.125, 1.25, 1.5)),
                "over_samples": Parameter((1.0, 1.125, 1.25, 1.5), SEVERAL_SAMPLES),
                "long_round_share": Parameter((0.25, 0.5, 0.75, 1.0)),
                "least_gain": Parameter((0.0, 0.02, 0.05, 0.1)),
                **PARTS,
            },
        ),
        Option("pooled", {"batches": Parameter((2, 3, 4, 8)), **PARTS}),
        Option("one_step_off", PARTS, STALENESS),
        Option(
            "fully_async",
            {
                "max_ahead": Parameter((0.0, 1.0, 1.125, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)),
                "max_groups": Parameter(
                    MultiplesOfSetting("prompts_per_step", (0, 1, 1.25, 1.5, 2, 3, 4))
                ),
                **PARTS,
            },
            STALENESS,
        ),
    ),
    "selection": (
        Option("in_order"),
        Option(
            "like_lengths",
            {
                "window": Parameter((2, 4, 8, 16)),
                "quantile": Parameter((0.5, 0.75, 0.9, 1.0)),
                "max_step_bias": Parameter((0.1, 0.25, 0.375, 0.5, 0.75, 1.0)),
                "order": Parameter(("shortest_first", "longest_first")),
            },
            REMEMBERS,
        ),
    ),
    "interruption": (
        Option("none"),
        Option(
            "partial",
            {
                "kv": Parameter(("recompute", "retain")),
                "at_update": Parameter(("resubmit", "in_place", "drain")),
                "segment_tokens": Parameter(
                    MultiplesOfSetting("max_tokens", (0, 0.125, 0.25, 0.5))
                ),
                "segment": Parameter(("budget", "chunk")),
            },
            STALENESS,
        ),
    ),
    "freshness": (
        Option("bounded", bars=CARRIES_OVER),
        Option(
            "bounded",
            {
                "max_staleness": Parameter(RangeToSetting("max_staleness")),
                "when_stale": Parameter(("wait", "drop")),
            },
            needs=CARRIES_OVER,
        ),
    ),
    "weights": (
        Option(
            "all_at_once",
            {
                "when": Parameter(("now", "between_batches")),
                "every": Parameter((1, 2, 4), STALENESS),
            },
        ),
        Option(
            "rolling",
            {"at_once": Parameter((1, 2, 4)), "order": Parameter(("joined", "emptiest"))},
            STALE_AND_SEVERAL,
        ),
    ),
    "routing": (
        Option("least_requests"),
        Option("round_robin"),
        Option(
            "length_split",
            {
                "long": Parameter((0.2, 0.4, 0.6)),
                "every": Parameter((2, 4, 8)),
                "weight": Parameter((1.0, 2.0, 4.0)),
            },
            SEVERAL_INSTANCES,
        ),
        Option("least_tokens"),
        Option(
            "group_tokens",
            {
                "shared_tokens": Parameter((256, 1024, 4096)),
                "margin": Parameter((2.0, 8.0, 32.0)),
            },
            SEVERAL_SAMPLES,
        ),
        Option(
            "session_affinity",
            {
                "margin": Parameter((0, 1, 2, 4, 8, 16, 32)),
                "wait_s": Parameter((0.01, 0.05, 0.2)),
                "shared_tokens": Parameter((256, 1024, 4096)),
                "prefill_tokens_per_s": Parameter(FixedSetting("prefill_tokens_per_s")),
            },
            MOVES,
        ),
    ),
    "ordering": (
        Option("fifo"),
        Option("longest_first", {"probes": Parameter((0, 1, 2))}),
        Option("shortest_first"),
        Option("resumed_first", needs=(("interruption", "partial"),)),
    ),
    "admission": (
        Option("slots", {"factor": Parameter((0.25, 0.375, 0.5, 0.75, 1.0, 1.25, 1.5))}),
        Option("kv_tokens", {"fill": Parameter((0.6, 0.8, 0.9, 1.0, 1.2, 1.5))}),
        Option("kv_growth", {"fill": Parameter((0.6, 0.8, 0.9, 1.0, 1.2, 1.5))}),
        Option(
            "session_cap",
            {
                "fill": Parameter((0.5, 0.7, 0.8, 0.9, 1.0, 1.2)),
                "overfill": Parameter((1.0, 1.2, 1.5, 2.0)),
            },
            SEVERAL_TURNS,
            reads_polls=True,
        ),
        Option(
            "aimd_concurrency",
            {"longest": Parameter(MultiplesOfSetting("max_tokens", (0.25, 0.5, 1, 2)))},
            SEVERAL_TURNS,
            reads_polls=True,
        ),
        Option("unbounded"),
    ),
    "prediction": (
        Option("none", bars=LIVES_BY_LENGTHS),
        Option(
            "group_history",
            {
                "quantile": Parameter((0.5, 0.75, 0.9, 1.0)),
                "method": Parameter(("quantile", "censored")),
            },
            needs=READS_LENGTHS,
        ),
        Option(
            "prompt_history",
            {"quantile": Parameter((0.5, 0.75, 0.9, 1.0))},
            REMEMBERS,
            needs=READS_LENGTHS,
        ),
    ),
    "migration": (
        Option("none"),
        Option(
            "by_cost",
            {
                "context_s": Parameter(FixedSetting("context_s")),
                "prefill_tokens_per_s": Parameter(FixedSetting("prefill_tokens_per_s")),
                "margin": Parameter((1.0, 2.0, 4.0)),
                "fill": Parameter((0.8, 0.9, 1.0)),
                "most": Parameter((1, 2, 4)),
                "interval_s": Parameter((1.0, 2.0, 5.0, 10.0)),
            },
            SEVERAL_INSTANCES,
            reads_polls=True,
        ),
        Option(
            "repack",
            {
                "fill": Parameter((0.6, 0.8, 0.9)),
                "slowdown": Parameter((1.0, 1.1, 1.25, 1.5)),
                "weights_tokens": Parameter(FixedSetting("weights_tokens")),
                "most": Parameter((1, 2, 4)),
                "interval_s": Parameter((2.0, 5.0, 10.0)),
            },
            SEVERAL_INSTANCES,
            reads_polls=True,
        ),
    ),
    "lending": (
        Option("none"),
        Option(
            "stage_fusion",
            {
                "whole": Parameter((0.6, 0.7, 0.8, 0.9)),
                "lent": Parameter((0.25, 0.5, 0.75)),
                "fill": Parameter((0.6, 0.8, 0.9)),
                "slowdown": Parameter((1.02, 1.05, 1.1, 1.2, 1.4)),
                "weights_tokens": Parameter(FixedSetting("weights_tokens")),
            },
            SHARED_AND_SEVERAL,
            reads_polls=True,
        ),
    ),
}

#: Starting points besides the presets: what trials of single mechanisms found good. Those that have
#: no effect in the setting are skipped.
STARTS: tuple[Table, ...] = (
    {"batching": {"use": "tail_batching", "over_prompts": 1.25, "over_samples": 1.0}},
    {
        "batching": {
            "use": "tail_batching",
            "over_prompts": 1.5,
            "over_samples": 1.0,
            "long_round_share": 0.5,
        }
    },
    {
        "batching": {"use": "tail_batching", "over_prompts": 1.125, "over_samples": 1.0},
        "selection": {"use": "like_lengths"},
    },
    {"batching": {"use": "sync", "part_prompts": 1}, "lending": {"use": "stage_fusion"}},
    {"migration": {"use": "by_cost"}},
    {"routing": {"use": "session_affinity"}},
    {"routing": {"use": "session_affinity"}, "admission": {"use": "session_cap"}},
    {
        "batching": {"use": "sync", "over_prompts": 1.25},
        "interruption": {"use": "partial"},
        "freshness": {"use": "bounded", "max_staleness": 1},
    },
    {
        "batching": {"use": "fully_async", "max_ahead": 1.5},
        "interruption": {"use": "partial", "kv": "retain"},
        "freshness": {"use": "bounded", "max_staleness": 1},
    },
)

#: How often a role is changed, others 1: what is launched, and what is kept, matters most.
WEIGHTS = {"batching": 4, "selection": 2, "interruption": 2, "freshness": 2}


def reads_polls(table: Table) -> bool:
    """Whether any of its policies uses polls; without them a replay takes a third less time."""
    blind = {
        (role, option.use)
        for role, of_role in SPACE.items()
        for option in of_role
        if not option.reads_polls
    }
    return any((role, row.get("use", DEFAULTS[role])) not in blind for role, row in table.items())


def options(role: str, setting: Setting, table: Table) -> Sequence[Option]:
    """The policies for the role, given those of the roles before it; never empty."""
    return [option for option in SPACE[role] if option.fits(setting, table)]
