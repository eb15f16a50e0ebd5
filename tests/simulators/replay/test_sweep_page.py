"""A grid of replays as a page."""

from __future__ import annotations

from rollout_sched.simulators.replay.sweep import sweep_page
from tests.page.test_run_page import data_of
from tests.simulators.replay.test_sweep_report import sweep


def test_every_replay_is_a_row_and_a_point() -> None:
    found = sweep()
    data = data_of(sweep_page(found))
    assert len(data["rows"]) == len(data["points"]) == 4
    on_frontier = [point["name"] for point in data["points"] if point["frontier"]]
    assert len(on_frontier) == len(found["frontier"]) > 0
    assert [row["name"].startswith("* ") for row in data["rows"]] == [
        point["frontier"] for point in data["points"]
    ]
    for axis in data["axes"]:
        assert len({point[axis["key"]] for point in data["points"]}) > 1, "else it says nothing"
    assert "gpus" in {axis["key"] for axis in data["axes"]}
    for point in data["points"]:
        assert {axis["key"] for axis in data["axes"]} <= point.keys()
        assert point["instances"] == point["gpus"]
        assert point["tokens_per_s"] > 0
        assert point["gpus"] == int(point["name"][-1])
