"""The example that learns: with fewer steps, under the policy whose tokens are the oldest and under
one without old ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.grpo_tiny import Job, train
from examples.learning_curves import Point
from examples.tiny_servers import Fleet, check_real, servers
from rollout_sched.core.errors import CallerError

JOB = Job(steps=12)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with servers(tmp_path_factory.mktemp("grpo"), instances=1) as started:
        yield started


def mean(points: list[Point]) -> float:
    return sum(point.reward for point in points) / len(points)


@pytest.mark.parametrize("policy", ["round_robin_sync", "areal"])
def test_it_learns(policy: str, fleet: Fleet, tmp_path: Path) -> None:
    """Who has learnt nothing is at a quarter; twelve steps come well above that, whatever the
    dice."""
    points = train(policy, fleet, JOB, tmp_path)
    assert len(points) == JOB.steps
    assert points[-1].samples == JOB.steps * JOB.prompts_per_step * JOB.samples
    assert mean(points[-3:]) > mean(points[:3]) + 0.1


def test_a_real_server_of_another_model_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    check_real(fleet.urls[0], fleet.model)
    with pytest.raises(CallerError, match="not the weights in"):
        check_real(fleet.urls[0], tmp_path)
