"""A cluster of three nodes on this machine, and simulated servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import ray
from ray.cluster_utils import Cluster

from rollout_sched.client import Prompt
from tests.neighbours.fleet import Program, fake_instance

#: Bytes of a node's object store: these tests pass only a few thousand tokens.
OBJECT_STORE = 100 * 2**20

NODES = 3

#: Timeout in seconds, also for a machine with much other work.
PATIENCE_S = 240.0

GREEDY = {"temperature": 0.0, "logprobs": 0}

#: Ray Serve opens a port for each replica, and does not wait until load balancers notice a removal.
SERVE = {
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
}

NODE = {
    "num_cpus": 1,
    "object_store_memory": OBJECT_STORE,
    "env_vars": SERVE,
}


def prompts(count: int, samples: int = 2) -> list[Prompt]:
    """Groups g0, g1, ..., each with its own prompt."""
    return [Prompt(f"g{n}", [n + 1, 7, 9], samples, 100, GREEDY) for n in range(count)]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster of three nodes; this process is connected to the first. A test that kills a node
    adds another."""
    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        for _ in range(NODES - 1):
            made.add_node(**NODE)
        made.wait_for_nodes()
        ray.init(address=made.address, log_to_driver=True)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def servers() -> Iterator[list[Program]]:
    """Two simulated servers of model m, whose answers take one or two seconds."""
    with ExitStack() as stack:
        options = ("--model", "m", "--speed", "0.5", "--median-tokens", "60", "--vocab-size", "512")
        yield [stack.enter_context(fake_instance(*options)) for _ in range(2)]
