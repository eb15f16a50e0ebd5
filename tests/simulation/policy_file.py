"""Writes the policy of a run as a file."""

from __future__ import annotations

import json
from pathlib import Path

from rollout_sched.config import PROSE, read_toml
from tests.simulation.plan import Plan


def write(plan: Plan, folder: Path) -> Path:
    """The policy of a plan with the plan's overrides and rewards."""
    name, tables = read_toml(plan.policy, "policies/presets", "policy")
    for role, keys in plan.overrides.items():
        tables[role] = {**tables.get(role, {}), **keys}
    if plan.rewards is not None:
        tables["rewards"] = plan.rewards.table
    lines: list[str] = []
    for table, keys in tables.items():
        if table not in PROSE:
            # JSON strings, numbers and booleans are valid TOML, too.
            lines += [
                f"[{table}]",
                *(f"{key} = {json.dumps(value)}" for key, value in keys.items()),
            ]
    path = folder / f"{name}.toml"
    path.write_text("\n".join(lines) + "\n")
    return path
