"""No key is in a store: not a client's, the trainer's, or an instance's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollout_sched.client import Prompt, Reload, RolloutScheduler
from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.gateway.serve import Service
from tests.live.scripted import Scripted

SECRETS = {name: f"{name}-key-{'0123456789abcdef' * 2}" for name in ("client", "admin", "instance")}


def test_no_key_is_in_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {name: tmp_path / name for name in SECRETS}
    for name, path in files.items():
        path.write_text(SECRETS[name] if name != "instance" else f"http://i0:1 {SECRETS[name]}\n")
        path.chmod(0o600)
    monkeypatch.setattr("rollout_sched.integrations.vllm.weights.ReloadFromDisk.check", _is_whole)

    async def scene() -> None:
        options = Options(
            policy="round_robin_sync",
            instances=["http://i0:1"],
            port=0,
            api_key_file=files["client"],
            admin_key_file=files["admin"],
            instance_api_key_file=files["instance"],
            store=tmp_path / "store",
            prompts_per_step=1,
        )
        instance = Scripted("http://i0:1")
        service = Service(options, lambda line: None, lambda new: instance)
        await service.open()
        client = RolloutScheduler.connect(service.url, admin_key=SECRETS["admin"])
        async with client as rollouts:
            await rollouts.submit([Prompt("a", [1], 1, 9)])
            asking = asyncio.create_task(rollouts.next_batch())
            await instance.answer(0, [5])
            assert await asking
            await rollouts.publish_weights(1, Reload("/weights/1"))
        await service.close()

    asyncio.run(scene())
    stored = [path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert any(b"/weights/1" in data for data in stored)  # the rest would be found
    for secret in SECRETS.values():
        assert not any(secret.encode() in data for data in stored)


async def _is_whole(self, version: int) -> None: ...
