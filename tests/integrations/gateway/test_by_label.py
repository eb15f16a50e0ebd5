"""Weights by the labels of the endpoints file, at simulated servers: memory here, a disk there."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rollout_sched import Reload, RolloutScheduler, Transfer
from rollout_sched.core.errors import RolloutError
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.gateway.serve import Service
from rollout_sched.simulators.fake_instance.engine import EngineSettings
from rollout_sched.simulators.fake_instance.server import FakeServer
from tests.integrations.faults.fleet import SETTINGS, SPEC
from tests.integrations.gateway.test_fleet import checkpoint


async def test_each_server_gets_them_by_its_label(tmp_path: Path) -> None:
    checkpoint(tmp_path / "weights")
    servers = [FakeServer(EngineSettings(SPEC, speed=1000.0)) for _ in range(3)]
    ports = [await server.start("127.0.0.1", 0) for server in servers]
    places = [{"link": "near"}, {"link": "far"}, {"rank": 2}]
    listed = [
        {"address": "127.0.0.1", "port": port, "labels": labels}
        for port, labels in zip(ports, places, strict=True)
    ]
    (tmp_path / "endpoints.json").write_text(json.dumps({"endpoints": listed}))
    options = Options(
        policy="areal",
        port=0,
        endpoints=tmp_path / "endpoints.json",
        weights_roots=[tmp_path],
        grace_s=0.1,
    )
    service = Service(options, lambda line: None, settings=SETTINGS)
    await service.open()
    try:
        while len(service.live.driver.view.instances) < 3:
            await asyncio.sleep(0.01)
        far = Reload(str(tmp_path / "weights"))
        near = Transfer({"names": ["w"]}, {"port": 1})
        async with RolloutScheduler.connect(service.url) as trainer:
            with pytest.raises(RolloutError, match="no loader of near, far is for instance"):
                await trainer.publish_weights(1, {"near": near, "far": far})
            outside = Transfer({"path": "/elsewhere/w"})
            with pytest.raises(RolloutError, match="lie outside of"):
                await trainer.publish_weights(1, {"*": outside})
            ways = {"near": near, "far": far, "*": far}
            await trainer.publish_weights(1, ways, wait=True)
        assert [one.version for one in service.live.driver.view.instances] == [1, 1, 1]
        told = [server.engine.weights.reported_label for server in servers]
        assert told == ["1", "1", "1"]
    finally:
        await service.close()
        for server in servers:
            await server.close()
