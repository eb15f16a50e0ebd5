"""`rollout-sched ray` on a running cluster."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from rollout_sched import cli
from rollout_sched.client import RolloutScheduler
from rollout_sched.integrations.ray import on_ray
from tests.neighbours.fleet import Program, fake_instance
from tests.ray.conftest import PATIENCE_S, prompts

OPTIONS = ("--model", "m", "--speed", "0.5", "--median-tokens", "60", "--vocab-size", "512")


@ray.remote(num_cpus=0)
class Server:
    """A simulated vLLM server that lives as long as the actor."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._server = self._stack.enter_context(fake_instance(*OPTIONS))

    def where(self) -> str:
        return self._server.url

    def stop(self) -> None:
        self._stack.close()
        ray.actor.exit_actor()


def test_up_status_and_down(
    cluster: Cluster,
    servers: list[Program],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = ("--name", "by-hand")
    policy = tmp_path / "mine.toml"
    policy.write_text('[routing]\nuse = "least_tokens"\n')
    given = ("--policy", str(policy), "--instance", servers[0].url, "--port", "0", "--fronts", "0")
    store = ("--store", str(tmp_path / "store"))
    assert cli.main(["ray", "status", *named]) == 2
    assert "no deployment 'by-hand'" in capsys.readouterr().err
    assert cli.main(["ray", "up", *named, *given, *store]) == 0
    said = capsys.readouterr().out
    assert "scheduler: http://" in said
    assert cli.main(["ray", "status", *named]) == 0
    assert capsys.readouterr().out == said
    assert cli.main(["ray", "down", *named]) == 0
    assert cli.main(["ray", "down", *named]) == 2


def test_what_is_wrong_is_said_before_anything_is_made(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["ray", "up", "--policy", "none such", "--name", "wrong"]) == 2
    assert "none such" in capsys.readouterr().err
    assert cli.main(["ray", "status", "--name", "wrong"]) == 2


def test_servers_that_are_named_actors_join_and_go(cluster: Cluster) -> None:
    named = ("--name", "by-names")
    started = [Server.options(name=f"command-{n}").remote() for n in range(2)]
    given = ("--policy", "one_step_off", "--port", "0", "--fronts", "0", "--prompts-per-step", "8")
    servers = ("--servers", "command-*", "--server-method", "where")
    assert cli.main(["ray", "up", *named, *given, *servers]) == 0

    async def scene() -> None:
        async with on_ray(name="by-names") as rollouts:
            await _instances(rollouts, 2)
            await rollouts.submit(prompts(8))
            first = await rollouts.next_batch()
            assert first is not None
            assert set(first.groups()) == {f"g{n}" for n in range(8)}
            started.append(Server.options(name="command-2").remote())
            await _instances(rollouts, 3)
            await rollouts.submit(prompts(16)[8:])
            for server in started[:2]:
                server.stop.remote()
            second = await rollouts.next_batch()
            assert second is not None
            assert set(second.groups()) == {f"g{n}" for n in range(8, 16)}
            await _instances(rollouts, 1)

    try:
        asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))
    finally:
        started[-1].stop.remote()
        assert cli.main(["ray", "down", *named]) == 0


async def _instances(rollouts: RolloutScheduler, count: int) -> None:
    while (await rollouts.state())["instances"] != count:
        await asyncio.sleep(0.2)
