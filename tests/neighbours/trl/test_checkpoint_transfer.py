"""Weights by a disk: what is published, and what is left there."""

from __future__ import annotations

from pathlib import Path

import torch

from rollout_sched.client import RolloutScheduler
from rollout_sched.integrations.trl import CheckpointTransfer
from tests.live.scripted import Scripted
from tests.neighbours.trl import fixtures

WEIGHTS = [("a", torch.ones(2))]


def test_each_is_the_next_version(tmp_path: Path) -> None:
    loaded: list[tuple[str, int]] = []

    class Instance(Scripted):
        async def collective_rpc(self, method: str, kwargs: dict[str, str], _: float) -> None:
            loaded.append((method, int(Path(kwargs["weights_path"]).name)))

    instance = Instance("http://a:1")
    policy = "round_robin_sync"
    with RolloutScheduler.from_toml(policy, [instance], version=5).blocking() as rollouts:
        transfer = CheckpointTransfer(rollouts, tmp_path)
        for version in (6, 7, 8):
            transfer.send_weights(WEIGHTS)
            assert rollouts.state()["version"] == version
            fixtures.wait_until(lambda: rollouts.state()["loaded"])
    assert loaded == [("reload_weights", version) for version in (6, 7, 8)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["7", "8"]
