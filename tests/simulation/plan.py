"""The plan of a run: everything that its seed decides, as data to print and to change."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import msgspec

from benchmarks.soak.hostile import ATTACKS
from rollout_sched.config import load_policy, shipped
from rollout_sched.store.store import Durable
from tests.simulation import faults, rewards, tools
from tests.simulation.rewards import Rewards
from tests.simulation.tools import Tools

#: How new weights reach the instances: loaded by the scheduler (reload, transfer), or by the
#: trainer itself, which then reports it (applied) or never does (around).
Weights = Literal["reload", "transfer", "applied", "around"]
AROUND_US: tuple[Weights, ...] = ("applied", "around")

WhenStale = Literal["wait", "drop", "mask"]

#: Policies in addition to the presets.
POLICIES = Path(__file__).parent / "policies"

#: Seconds of an engine step.
STEP_S = 0.01

#: All faults happen within these virtual seconds, however long the work takes.
LONGEST_S = 40.0

#: Seeds from here on draw from all present choices. Smaller seeds draw from the choices that
#: existed when they found a bug, so that their plans stay the same.
EVERYTHING = 2**31


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A world, its work and its faults.

    versioned    each version generates other tokens
    train_s      seconds of a training step
    latency_s    least latency of a packet
    calls        calls of well-behaved clients
    attacks      calls of hostile clients: (second, kind)
    flood        calls of one more client, all at once: (second, number)
    overrides    policy keys that differ, by table
    trainers     number of trainers that share the batches; leases last `lease_s` (0: forever)
    rewards      rewards of the samples; None: none
    in_process   the scheduler runs in the trainer's process, without a gateway
    tools        tools of the trajectories; None: each response is one turn
    pause_mode   of a trainer that loads its weights around us
    open_s       until when submissions stay open and failed groups are submitted again; 0: they are
                 closed at once
    """

    seed: int
    policy: str
    groups: int
    samples: int
    max_tokens: int
    prompts_per_step: int
    parts: bool
    stream_every: int
    durable: Durable
    weights: Weights
    instances: int
    slots: int
    kv_blocks: int
    versioned: bool
    train_s: float
    latency_s: float
    calls: int
    attacks: list[tuple[float, str]]
    flood: tuple[float, int] | None = None
    faults: list[faults.Any]
    overrides: dict[str, dict[str, Any]] = {}
    trainers: int = 1
    lease_s: float = 0.0
    rewards: Rewards | None = None
    in_process: bool = False
    tools: Tools | None = None
    pause_mode: Literal["keep", "abort", "wait"] = "keep"
    open_s: float = 0.0

    @property
    def horizon_s(self) -> float:
        """The approximate end of the work without faults, plus a margin; faults happen before
        it."""
        steps = -(-self.groups // self.prompts_per_step)
        waves = -(-self.prompts_per_step * self.samples // (self.slots * self.instances))
        step_s = self.train_s + waves * self.max_tokens * STEP_S * 0.7 + 0.3
        return min(LONGEST_S, 2 + 1.5 * steps * step_s)

    @property
    def calm_s(self) -> float:
        return max((fault.over_s for fault in self.faults), default=0.0)

    def told(self) -> list[str]:
        """A description for people, in lines."""
        world = {
            key: value
            for key, value in msgspec.structs.asdict(self).items()
            if key not in ("faults", "attacks")
        }
        lines = [" ".join(f"{key}={value}" for key, value in world.items())]
        lines += [f"t={at_s:.3f} attack: {kind}" for at_s, kind in self.attacks]
        return [*lines, *map(str, self.faults)]


def policies() -> list[str]:
    """The names of the presets and the policy files."""
    return [*shipped("policies/presets"), *(str(path) for path in sorted(POLICIES.glob("*.toml")))]


def draw(seed: int) -> Plan:
    """The plan of this seed."""
    plan = _basis(seed)
    if seed < EVERYTHING:
        return plan
    plan = _even_more(_more(plan, Random(f"more/{seed}")), Random(f"even more/{seed}"))
    rng = Random(f"flood/{seed}")
    if plan.in_process or rng.random() > 0.15:
        return plan
    flood = round(rng.uniform(0, plan.horizon_s), 3), rng.choice([30, 100])
    return msgspec.structs.replace(plan, flood=flood)


def _basis(seed: int) -> Plan:
    """The part that every seed draws."""
    rng = Random(f"plan/{seed}")
    step, instances = rng.randint(1, 4), rng.randint(1, 3)
    durable: Durable = rng.choice(["batch", "batch", "event", "off"])
    calm = Plan(
        seed=seed,
        policy=rng.choice(policies()),
        groups=step * rng.randint(1, 6) + rng.choice([0, 0, 1]),
        samples=rng.randint(1, 4),
        max_tokens=rng.choice([20, 100, 300]),
        prompts_per_step=step,
        parts=rng.random() < 0.3,
        stream_every=rng.choice([0, 1, 4, 16]),
        durable=durable,
        weights=rng.choice(["reload", "reload", "transfer"]),
        instances=instances,
        slots=rng.choice([1, 2, 4, 16]),
        kv_blocks=rng.choice([100, 400, 4000]),
        versioned=rng.choice([False, False, True, True]),
        train_s=rng.choice([0.0, 0.3, 3.0]),
        latency_s=rng.choice([0.0001, 0.002, 0.03]),
        calls=rng.choice([0, 0, 5, 15]),
        attacks=[],
        faults=[],
    )
    return msgspec.structs.replace(
        calm,
        attacks=_attacks(rng, calm.horizon_s) if calm.calls else [],
        faults=faults.draw(rng, calm.horizon_s, instances, power=durable != "off"),
    )


def _more(plan: Plan, rng: Random) -> Plan:
    """Choices that were added later, from their own random generator."""
    trainers, in_process = rng.choice([(1, False), (1, False), (2, False), (2, False), (1, True)])
    plan = msgspec.structs.replace(
        plan,
        overrides=_overrides(rng, plan.policy),
        rewards=rewards.draw(rng) if rng.random() < 0.4 else None,
        trainers=trainers,
        lease_s=rng.choice([0.0, 4.0, 8.0, 30.0]) if trainers > 1 else 0.0,
        # With several trainers it would be unknown what a damaged store has forgotten.
        durable="batch" if trainers > 1 and plan.durable == "off" else plan.durable,
        in_process=in_process,
        tools=tools.draw(rng) if in_process and rng.random() < 0.7 else None,
        calls=0 if in_process else plan.calls,
        attacks=[] if in_process else plan.attacks,
    )
    if trainers == 1 and not in_process and rng.random() < 0.25:
        plan = msgspec.structs.replace(
            plan,
            weights=rng.choice(AROUND_US),
            pause_mode=rng.choice(["keep", "abort", "wait"]),
        )
    more = faults.draw_more(rng, plan)
    found = sorted([*plan.faults, *more], key=lambda fault: fault.at_s)
    return msgspec.structs.replace(plan, faults=found)


def _even_more(plan: Plan, rng: Random) -> Plan:
    """Choices that were added after that, in a share of the runs; the others stay the same."""
    if plan.trainers == 2 and rng.random() < 0.3:
        plan = msgspec.structs.replace(plan, trainers=3)
    if plan.trainers == 1 and rng.random() < 0.4:
        open_s = round(rng.uniform(2.0, plan.horizon_s), 3)
        plan = msgspec.structs.replace(plan, open_s=open_s)
    more = faults.draw_even_more(rng, plan)
    found = sorted([*plan.faults, *more], key=lambda fault: fault.at_s)
    return msgspec.structs.replace(plan, faults=found)


def _overrides(rng: Random, policy: str) -> dict[str, dict[str, Any]]:
    """What happens to stale samples, and the size of parts, if the policy has these keys."""
    roles = load_policy(policy).roles
    asked: dict[str, dict[str, Any]] = {
        "freshness": {"when_stale": rng.choice(get_args(WhenStale))},
        "batching": {"part_prompts": rng.choice([1, 2])},
    }
    return {
        role: keys
        for role, keys in asked.items()
        if rng.random() < 0.5 and keys.keys() <= set(roles[role][0].__struct_fields__)
    }


def _attacks(rng: Random, until_s: float) -> list[tuple[float, str]]:
    number = rng.choice([0, 0, 3, 10])
    return sorted(
        (round(rng.uniform(0, until_s), 3), rng.choice(list(ATTACKS))) for _ in range(number)
    )
