"""A cluster whose head dies when a line arrives on standard input: `python -m tests.ray.headless
FOLDER URL...` starts a deployment for the servers at these URLs and prints the addresses of its
scheduler and fronts that are not on the head, as a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from rollout_sched.integrations.gateway.options import Options
from rollout_sched.integrations.ray import cluster as clusters
from rollout_sched.integrations.ray.deployment import Deployment
from tests.ray.conftest import NODE
from tests.ray.test_fronts import fronts

WORKERS = 2

#: The trainer's key.
KEY = "trainer"


async def started(cluster: Cluster, folder: Path, urls: list[str]) -> dict[str, object]:
    workers = {node.node_id for node in cluster.worker_nodes}
    deployment = Deployment(name="headless", scheduler_node=min(workers))
    key = folder / "trainer.key"
    key.write_text(f"{KEY}\n")
    options = Options(
        policy="one_step_off",
        instances=urls,
        port=0,
        store=folder / "store",
        trainer_key_file=key,
        prompts_per_step=6,
        stream_every=4,
    )
    facts = await clusters.start(options, deployment)
    found = await fronts(deployment, WORKERS + 1)
    beside = [url for name, url in found.items() if name.rpartition("/")[2] in workers]
    return {"scheduler": facts.url, "fronts": beside}


def main(folder: str, *urls: str) -> None:
    cluster = Cluster(
        initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "include_dashboard": False}
    )
    try:
        for _ in range(WORKERS):
            cluster.add_node(**NODE)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        told = asyncio.run(started(cluster, Path(folder), list(urls)))
        ray.shutdown()  # a driver does not outlive the head
        print(json.dumps(told), flush=True)
        sys.stdin.readline()
        for name in ("gcs_server", "raylet"):
            for one in cluster.head_node.all_processes[name]:
                os.kill(one.process.pid, signal.SIGKILL)
        print("gone", flush=True)
        sys.stdin.readline()
    finally:
        for node in cluster.worker_nodes:
            node.kill_all_processes(check_alive=False, allow_graceful=False)
        cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
