"""A run before it begins: all that its seed decides, to be printed and to be changed."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Literal

import msgspec

from benchmarks.soak.hostile import ATTACKS
from rollout_sched.config import shipped
from rollout_sched.store.store import Durable
from tests.simulation import faults

#: Policies beside the presets.
POLICIES = Path(__file__).parent / "policies"

#: Seconds of an engine step.
STEP_S = 0.01

#: Virtual seconds within which all faults lie, however long the work is.
LONGEST_S = 40.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A world, its work, and what befalls it.

    drift        share of the places at which another version's token is another; 0: all versions
                 say the same
    train_s      that a training step takes
    latency_s    of a packet, at least
    calls        of well-behaved clients
    attacks      of hostile ones: (second, kind)
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
    weights: Literal["reload", "transfer"]
    instances: int
    slots: int
    kv_blocks: int
    drift: float
    train_s: float
    latency_s: float
    calls: int
    attacks: list[tuple[float, str]]
    faults: list[faults.Any]

    @property
    def horizon_s(self) -> float:
        """About when the work is done if nothing goes wrong, and a little more; faults lie before
        it."""
        steps = -(-self.groups // self.prompts_per_step)
        waves = -(-self.prompts_per_step * self.samples // (self.slots * self.instances))
        step_s = self.train_s + waves * self.max_tokens * STEP_S * 0.7 + 0.3
        return min(LONGEST_S, 2 + 1.5 * steps * step_s)

    @property
    def calm_s(self) -> float:
        return max((fault.over_s for fault in self.faults), default=0.0)

    def told(self) -> list[str]:
        """For people, a line each."""
        world = {
            key: value
            for key, value in msgspec.structs.asdict(self).items()
            if key not in ("faults", "attacks")
        }
        lines = [" ".join(f"{key}={value}" for key, value in world.items())]
        lines += [f"t={at_s:.3f} attack: {kind}" for at_s, kind in self.attacks]
        return [*lines, *map(str, self.faults)]


def policies() -> list[str]:
    """Presets by name, and files."""
    return [*shipped("policies/presets"), *(str(path) for path in sorted(POLICIES.glob("*.toml")))]


def draw(seed: int) -> Plan:
    """The run of this seed."""
    dice = Random(f"plan/{seed}")
    step, instances = dice.randint(1, 4), dice.randint(1, 3)
    durable: Durable = dice.choice(["batch", "batch", "event", "off"])
    calm = Plan(
        seed=seed,
        policy=dice.choice(policies()),
        groups=step * dice.randint(1, 6) + dice.choice([0, 0, 1]),
        samples=dice.randint(1, 4),
        max_tokens=dice.choice([20, 100, 300]),
        prompts_per_step=step,
        parts=dice.random() < 0.3,
        stream_every=dice.choice([0, 1, 4, 16]),
        durable=durable,
        weights=dice.choice(["reload", "reload", "transfer"]),
        instances=instances,
        slots=dice.choice([1, 2, 4, 16]),
        kv_blocks=dice.choice([100, 400, 4000]),
        drift=dice.choice([0.0, 0.0, 0.03, 1.0]),
        train_s=dice.choice([0.0, 0.3, 3.0]),
        latency_s=dice.choice([0.0001, 0.002, 0.03]),
        calls=dice.choice([0, 0, 5, 15]),
        attacks=[],
        faults=[],
    )
    return msgspec.structs.replace(
        calm,
        attacks=_attacks(dice, calm.horizon_s) if calm.calls else [],
        faults=faults.draw(dice, calm.horizon_s, instances, power=durable != "off"),
    )


def _attacks(dice: Random, until_s: float) -> list[tuple[float, str]]:
    number = dice.choice([0, 0, 3, 10])
    return sorted(
        (round(dice.uniform(0, until_s), 3), dice.choice(list(ATTACKS))) for _ in range(number)
    )
