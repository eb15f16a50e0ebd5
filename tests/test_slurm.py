"""docs/slurm/rollout.sbatch, with stand-ins for Slurm, vLLM and our own command."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import rollout_sched
from rollout_sched.cli import parse
from rollout_sched.integrations.gateway.endpoints_file import read_endpoints
from rollout_sched.integrations.gateway.options import given_options

SCRIPT = Path(rollout_sched.__file__).parents[1] / "docs/slurm/rollout.sbatch"
PATIENCE_S = 30.0

SCONTROL = """
[ "$1 $2 $3" = "show hostnames node[1-2]" ] || exit 1
printf 'node1\\nnode2\\n'
"""
#: Say what they were told; a gateway drains when it is told to stop.
SRUN = 'echo "$VLLM_SERVER_DEV_MODE $VLLM_API_KEY $MODEL $*" > "$TOLD/srun"; exec sleep 60'
ROLLOUT_SCHED = """
trap 'sleep 0.3; echo drained > "$TOLD/drained"; exit 0' TERM
printf '%s\\n' "$@" > "$TOLD/serve.new"; mv "$TOLD/serve.new" "$TOLD/serve"
for turn in $(seq 600); do sleep 0.1; done
"""


class Cluster:
    """A job's environment. `told`: the folder in which programs write what they were told."""

    def __init__(self, folder: Path) -> None:
        self.told, self.run, self._bin = folder / "told", folder / "run", folder / "bin"
        keys = folder / "keys"
        for made in (self.told, self._bin, keys):
            made.mkdir()
        (keys / "instances").write_text("secret\n")
        self.program("scontrol", SCONTROL)
        self.program("srun", SRUN)
        self.program("rollout-sched", ROLLOUT_SCHED)
        self.environment = {
            "PATH": f"{self._bin}:{os.environ['PATH']}",
            "TOLD": str(self.told),
            "RUN": str(self.run),
            "KEYS": str(keys),
            "MODEL": "/shared/base",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_GPUS_PER_NODE": "h100:2",
        }

    def program(self, name: str, script: str) -> None:
        path = self._bin / name
        path.write_text(f"#!/bin/bash\n{script}")
        path.chmod(0o755)

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([str(SCRIPT)], env=self.environment, stderr=subprocess.PIPE)

    def wait_for(self, name: str) -> str:
        path = self.told / name
        give_up = time.monotonic() + PATIENCE_S
        while not path.exists():
            assert time.monotonic() < give_up, f"no {name}"
            time.sleep(0.02)
        return path.read_text()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_job_names_a_server_per_gpu_and_drains_at_the_time_limit(cluster: Cluster) -> None:
    job = cluster.start()
    options = given_options(parse(cluster.wait_for("serve").splitlines()))
    assert options.store == cluster.run / "store"
    assert options.endpoints is not None
    urls = [endpoint.url for endpoint in read_endpoints(options.endpoints)]
    assert urls == [f"http://node{node}:{port}" for node in (1, 2) for port in (8000, 8001)]
    told = cluster.wait_for("srun")
    assert told.startswith("1 secret /shared/base --ntasks-per-node=2 ")
    assert "--port $((8000 + SLURM_LOCALID))" in told
    job.send_signal(signal.SIGTERM)
    assert job.wait(PATIENCE_S) == 0
    assert cluster.wait_for("drained"), "it was waited for"


def test_server_file_stays_when_slurm_does_not_answer(cluster: Cluster) -> None:
    cluster.run.mkdir()
    (cluster.run / "endpoints.yaml").write_text("as it was")
    cluster.program("scontrol", "exit 1")
    job = cluster.start()
    assert job.wait(PATIENCE_S) == 1
    assert (cluster.run / "endpoints.yaml").read_text() == "as it was"
    assert not (cluster.told / "serve").exists()


def test_a_gateway_that_cannot_start_fails_the_job(cluster: Cluster) -> None:
    cluster.program("rollout-sched", "exit 2")
    assert cluster.start().wait(PATIENCE_S) == 2


def test_missing_settings_are_named(cluster: Cluster) -> None:
    del cluster.environment["KEYS"]
    job = cluster.start()
    assert b"KEYS: a folder with the files clients" in job.communicate(timeout=PATIENCE_S)[1]
    assert job.returncode
