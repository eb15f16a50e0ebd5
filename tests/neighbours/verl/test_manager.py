"""verl's own agent loops behind our scheduler, before simulated servers: what they write to
TransferQueue, read back by verl's own sampler (verl 0.9.1, `trainer/ppo/v1`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import ray
import transfer_queue
from omegaconf import DictConfig, OmegaConf, open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.utils import tensordict_utils

from rollout_sched.integrations.verl.manager import (
    GatewayAgentLoopManager,
    ScheduledAgentLoopManager,
)

#: Seconds until something must have happened, on a machine that does much else besides.
PATIENCE_S = 120.0

#: Short responses, at once; a batch of the trainer's is two groups.
FAKE = ["--speed", "50", "--median-tokens", "60", "--vocab-size", "256"]
SERVE = ["--prompts-per-step", "2"]

TOKENS = ["prompts", "responses", "response_mask", "loss_mask", "input_ids", "position_ids"]
FIELDS = [*TOKENS, "rm_scores", "rollout_log_probs", "extra_fields", "num_turns", "data_source"]


@ray.remote(num_cpus=0)
class RewardWorker:
    """verl's reward loop worker: a reward by the length of the response."""

    async def compute_score(self, data: Any) -> dict[str, Any]:
        tokens = float(data.batch["responses"].shape[-1])
        return {"reward_score": tokens, "reward_extra_info": {"acc": tokens}}


class Trainer:
    """What verl's does (`trainer_base.py`) but train: submits prompts, takes what was made of them
    by verl's own sampler, clears it."""

    def __init__(self, config: DictConfig, manager_class: Any, gateway: str) -> None:
        with open_dict(config):
            ours = {"rollout_sched": {"gateway": gateway, "look_s": 0.1}}
            config.actor_rollout_ref.rollout.custom = OmegaConf.create(ours)
        self.manager = manager_class.create(
            config=config,
            llm_client=None,
            teacher_client=None,
            reward_loop_worker_handles=[RewardWorker.remote()],
        )
        self.sampler = ReplayBuffer(
            "sync", config.trainer, None, "drop", OmegaConf.create({}), poll_interval=0.1
        )

    def submit(self, uids: Sequence[str], step: int, *, validate: bool = False) -> None:
        """As `_submit_batch_to_rollout` and `_validate`."""
        tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in uids]
        partition = "val" if validate else "train"
        transfer_queue.kv_batch_put(keys=list(uids), partition_id=partition, tags=tags)
        self.manager.generate_sequences(_rows(uids, step, validate))

    def sample(self, step: int, groups: int, partition: str = "train") -> KVBatchMeta:
        """Waits until so many groups are settled, and takes them."""
        meta, _ = self.sampler.sample(step, partition, groups)
        return meta

    def clear(self, meta: KVBatchMeta) -> None:
        """The step is over."""
        transfer_queue.kv_clear(keys=meta.keys, partition_id=meta.partition_id)


def read(meta: KVBatchMeta, fields: Iterable[str]) -> dict[str, list[Any]]:
    """Field -> a row for each key, in plain Python."""
    data = transfer_queue.kv_batch_get(
        keys=meta.keys, partition_id=meta.partition_id, select_fields=list(fields)
    )
    return {field: [_plain(row) for row in data[field]] for field in fields}


def status_of(uid: str) -> str | None:
    """Of a group of the training partition; None once it was taken."""
    tags = transfer_queue.kv_list("train").get("train", {})
    return tags[uid]["status"] if uid in tags else None


def _rows(uids: Sequence[str], step: int, validate: bool) -> Any:
    raw = np.empty(len(uids), dtype=object)
    raw[:] = [[{"role": "user", "content": f"What is {uid}?"}] for uid in uids]
    columns = {
        "uid": np.array(uids, dtype=object),
        "raw_prompt": raw,
        "index": np.arange(len(uids)),
        "data_source": np.array(["made"] * len(uids), dtype=object),
    }
    rows = tensordict_utils.get_tensordict(columns)
    tensordict_utils.assign_non_tensor_data(rows, "global_steps", step)
    if validate:
        tensordict_utils.assign_non_tensor_data(rows, "validate", True)
    return rows


def _plain(row: Any) -> Any:
    row = getattr(row, "data", row) if not hasattr(row, "tolist") else row
    return row.tolist() if hasattr(row, "tolist") else row


def wait_until(condition: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, f"not within {PATIENCE_S:.0f} s: {what}"
        time.sleep(0.05)


def publish(ours, version: int) -> None:
    ours.gateway.post("/admin/weights", {"version": version, "applied": True, "wait": True})


def check_rows(meta, version: int | None = None) -> None:
    """All that verl's trainer reads of these samples fits together."""
    rows = read(meta, FIELDS)
    for number, tag in enumerate(meta.tags):
        row = {field: values[number] for field, values in rows.items()}
        prompt, response = row["prompts"], row["responses"]
        whole = prompt + response
        assert row["input_ids"] == whole
        assert row["position_ids"] == list(range(len(whole)))
        assert row["response_mask"] == row["loss_mask"] == [1] * len(response)
        assert len(row["rollout_log_probs"]) == len(response)
        assert all(value < 0 for value in row["rollout_log_probs"])
        assert row["rm_scores"] == [0.0] * (len(response) - 1) + [float(len(response))]
        assert row["data_source"] == "made"
        extra = row["extra_fields"]
        assert len(extra["versions"]) == len(response)
        assert extra["reward_extra_info"] == {"acc": len(response)}
        assert (tag["prompt_len"], tag["response_len"]) == (len(prompt), len(response))
        assert tag["seq_len"] == len(whole)
        assert tag["min_global_steps"] == extra["min_global_steps"] == min(extra["versions"])
        assert tag["max_global_steps"] == extra["max_global_steps"] == max(extra["versions"])
        if version is not None:
            assert set(extra["versions"]) == {version}


def test_groups_are_read_back_by_verls_sampler(servers, queue, config):
    """Batch after batch: the next one is of the next weights, and comes when the trainer has
    cleared the last. A group that cannot be made is told as failed."""
    with servers.fleet(2, policy="round_robin_sync", fake=FAKE, serve=SERVE) as ours:
        trainer = Trainer(config, ScheduledAgentLoopManager, ours.url)
        trainer.submit(["a", "b"], 1)
        first = trainer.sample(1, 2)
        assert sorted(first.keys) == [f"{uid}_{n}_0" for uid in "ab" for n in range(3)]
        assert {tag["status"] for tag in first.tags} == {"success"}
        assert {tag["global_steps"] for tag in first.tags} == {1}
        check_rows(first, version=0)

        publish(ours, 1)
        trainer.submit(["c", "d"], 2)
        trainer.clear(first)
        second = trainer.sample(2, 2)
        assert {key.split("_")[0] for key in second.keys} == {"c", "d"}
        check_rows(second, version=1)

        long = "e" * 300  # more than the name of a group may have
        trainer.submit([long], 3)
        wait_until(lambda: status_of(long) == "failure", "a group that cannot be made has failed")

        trainer.submit(["v"], 3, validate=True)
        assert trainer.sample(3, 1, "val").keys == ["v_0_0"]
        groups = ours.gateway.get("/admin/state")["groups"]
        assert groups["delivered"] == 4, "a validation is no group of a batch"


def test_a_response_that_two_versions_made_says_so(servers, queue, config, tmp_path):
    policy = tmp_path / "in_place.toml"
    policy.write_text(
        '[batching]\nuse = "sync"\n\n[freshness]\nuse = "bounded"\nmax_staleness = 2\n\n'
        '[interruption]\nuse = "partial"\nat_update = "in_place"\nkv = "recompute"\n\n'
        '[weights]\nuse = "all_at_once"\n'
    )
    # 200 tokens take some 8 s: both instances are in the middle of theirs when the weights come.
    slow = ["--speed", "0.25", "--median-tokens", "200", "--sigma", "0.1", "--vocab-size", "256"]
    with servers.fleet(2, policy=str(policy), fake=slow, serve=SERVE) as ours:
        trainer = Trainer(config, ScheduledAgentLoopManager, ours.url)
        trainer.submit(["a", "b"], 1)
        for instance in ours.instances:
            wait_until(
                lambda instance=instance: instance.metric("vllm:generation_tokens_total") > 0,
                "every instance makes tokens",
            )
        publish(ours, 1)
        made = trainer.sample(1, 2)
        check_rows(made)
        spans = {(tag["min_global_steps"], tag["max_global_steps"]) for tag in made.tags}
        assert (0, 1) in spans


def test_verls_loops_may_stay_with_a_gateway_for_each_turn(servers, queue, config):
    with servers.fleet(2, policy="dplb", fake=FAKE) as ours:
        trainer = Trainer(config, GatewayAgentLoopManager, ours.url)
        trainer.submit(["a", "b"], 1)
        made = trainer.sample(1, 2)
        assert len(made.keys) == 6
        check_rows(made, version=0)


@pytest.mark.usefixtures("cluster")
def test_what_is_no_gateway_is_said_at_once(servers, config):
    with servers.fake_instance() as instance, pytest.raises(Exception, match="not a gateway"):
        Trainer(config, ScheduledAgentLoopManager, instance.url)
