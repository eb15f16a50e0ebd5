"""One table over a grid of replays, and the frontier."""

from __future__ import annotations

from typing import Any

import msgspec

from rollout_sched.simulators.replay import report as reports
from rollout_sched.simulators.replay.runs import replay
from rollout_sched.simulators.replay.sweep import World, document, table
from tests.helpers import make_policy, make_scenario, make_trace


def sweep() -> dict[str, Any]:
    trace = make_trace({f"g{i}": [5 + 3 * i, 9 - i] for i in range(6)}, name="tiny")
    policies = [make_policy("one"), make_policy("two", batching="fully_async")]
    found, where = [], []
    for instances in (1, 2):
        scenario = make_scenario(prompts_per_step=2, instances=instances)
        runs = replay(trace, policies, scenario)
        found.append(reports.document(trace, scenario, runs, steps=0, seeds=1))
        where.append(World(scenario, f"fleet.instances={instances}"))
    return document(found, where)


def test_every_world_has_its_report() -> None:
    found = sweep()
    assert found["schema"] == "rollout-sched-sweep/1"
    assert [world["changed"] for world in found["worlds"]] == [
        "fleet.instances=1",
        "fleet.instances=2",
    ]
    assert [len(world["policies"]) for world in found["worlds"]] == [2, 2]
    assert msgspec.json.decode(msgspec.json.encode(found))


def test_the_frontier_is_what_none_beats() -> None:
    found = sweep()
    places = [(one["world"], one["policy"]) for one in found["frontier"]]
    rows = {
        (world["changed"], policy["name"]): policy["equal_length_tokens_per_s"]["mean"]
        for world in found["worlds"]
        for policy in world["policies"]
    }
    fastest = max(rows.values())
    assert rows[places[0]] >= 0.99 * fastest
    few = {place: speed for place, speed in rows.items() if place[0] == "fleet.instances=1"}
    assert any(place in few for place in places)  # with fewer GPUs nobody is faster


def test_a_row_for_each_that_fits_the_line() -> None:
    found = sweep()
    for width in (80, 100, 200):
        text = table(found, width)
        assert max(map(len, text.splitlines())) <= width
        for name in ("one | fleet.instances=1", "two | fleet.instances=2"):
            assert text.count(name) == 1
        rows = [
            line for line in text.splitlines() if line.startswith("* ") and " on the " not in line
        ]
        assert len(rows) == len(found["frontier"])
