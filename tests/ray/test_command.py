"""`rollout-sched ray` on a cluster that is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from rollout_sched import cli
from tests.neighbours.fleet import Program


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
