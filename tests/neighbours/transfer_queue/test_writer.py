"""Batches of ours through a real TransferQueue on Ray: put, fetched, consumed once, cleared."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import ray
import transfer_queue
from omegaconf import OmegaConf

from rollout_sched.integrations.transfer_queue.writer import BatchWriter
from rollout_sched.live.trainer.samples import Batch, Sample, Span

#: Bytes of Ray's object store.
OBJECT_STORE = 100 * 2**20

TOKENS = ["prompts", "responses", "response_mask", "rollout_log_probs", "versions"]


@pytest.fixture(scope="module", autouse=True)
def queue() -> Iterator[None]:
    """TransferQueue on two cores, of which its controller and a storage unit take one each; it
    hands out what there is."""
    ray.init("local", num_cpus=2, object_store_memory=OBJECT_STORE, include_dashboard=False)
    try:
        storage = {"SimpleStorage": {"num_data_storage_units": 1}}
        conf = {"controller": {"polling_mode": True}, "backend": storage}
        transfer_queue.init(OmegaConf.create(conf))
        yield
        transfer_queue.close()
    finally:
        ray.shutdown()


def sample(uid: str, index: int, response: list[int], version: int) -> Sample:
    tokens = len(response)
    return Sample(
        uid=uid,
        index=index,
        prompt_ids=[1, 2, 3],
        response_ids=response,
        response_mask=[1] * tokens,
        rollout_log_probs=[-0.5 * token for token in response],
        versions=[version] * tokens,
        segments=[Span(version, "http://a", 0, tokens)] if tokens else [],
        staleness=0,
        finish_reason="stop",
        status="COMPLETED",
        num_interruptions=0,
        extra={"answer": uid},
    )


def batch(number: int, *samples: Sample) -> Batch:
    return Batch(number, version=7, samples=list(samples))


def put(partition: str, made: Batch) -> transfer_queue.KVBatchMeta | None:
    return asyncio.run(BatchWriter(partition).put(made))


def fetch(partition: str, samples: int, task: str = "train") -> transfer_queue.BatchMeta:
    return transfer_queue.get_client().get_meta(
        TOKENS, samples, partition, mode="fetch", task_name=task
    )


def test_what_is_put_is_read_back_by_its_keys():
    made = batch(1, sample("a", 0, [4, 5, 6], 7), sample("a", 1, [8], 6))
    meta = put("by_key", made)
    assert meta.keys == ["a_0_0", "a_1_0"]

    data = transfer_queue.kv_batch_get(keys=meta.keys, partition_id="by_key")
    assert [row.tolist() for row in data["responses"]] == [[4, 5, 6], [8]]
    assert [row.tolist() for row in data["input_ids"]] == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 8]]
    assert [row.tolist() for row in data["position_ids"]] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3]]
    assert [row.tolist() for row in data["rollout_log_probs"]] == [[-2.0, -2.5, -3.0], [-4.0]]
    assert [row.tolist() for row in data["versions"]] == [[7, 7, 7], [6]]
    assert list(data["uid"]) == ["a", "a"]
    assert list(data["extra"]) == [{"answer": "a"}] * 2

    tags = transfer_queue.kv_list("by_key")["by_key"]
    assert tags["a_1_0"]["response_len"] == 1
    assert tags["a_1_0"]["min_global_steps"] == 6
    assert tags["a_0_0"]["global_steps"] == 7


def test_each_sample_is_consumed_once_by_each_task():
    put("once", batch(1, sample("a", 0, [4], 7), sample("b", 0, [5, 5], 7)))
    put("once", batch(2, sample("c", 0, [6], 7)))
    client = transfer_queue.get_client()

    first = fetch("once", 2)
    assert [row.tolist() for row in client.get_data(first)["responses"]] == [[4], [5, 5]]
    second = fetch("once", 1)
    assert [row.tolist() for row in client.get_data(second)["responses"]] == [[6]]
    assert fetch("once", 1).size == 0
    assert fetch("once", 3, task="reference").size == 3


def test_what_is_cleared_is_gone():
    put("cleared", batch(1, sample("a", 0, [4], 7), sample("b", 0, [5], 7)))
    client = transfer_queue.get_client()
    client.clear_samples(fetch("cleared", 1))
    assert list(transfer_queue.kv_list("cleared")["cleared"]) == ["b_0_0"]


def test_an_empty_response_is_a_row_like_others():
    meta = put("empty", batch(1, sample("a", 0, [], 7), sample("b", 0, [5], 7)))
    data = transfer_queue.kv_batch_get(keys=meta.keys, partition_id="empty")
    assert [row.tolist() for row in data["responses"]] == [[], [5]]


def test_a_part_without_samples_writes_nothing():
    assert put("nothing", batch(1)) is None
    assert not (transfer_queue.kv_list("nothing") or {}).get("nothing")
