"""verl's own agent loops behind our scheduler, before simulated servers: what they write to
TransferQueue, read back by verl's own sampler (verl 0.9.1, `trainer/ppo/v1`)."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import transfer_queue
from omegaconf import DictConfig, OmegaConf, open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.utils import tensordict_utils
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.router import get_router_handle

from rollout_sched.integrations.verl.manager import (
    GatewayAgentLoopManager,
    ScheduledAgentLoopManager,
)

#: Seconds until something must have happened, on a machine that does much else besides.
PATIENCE_S = 300.0

#: Tokens of the longest response, as in conftest.py.
RESPONSE_LENGTH = 256

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

    def __init__(
        self, config: DictConfig, manager_class: Any, *, llm_client: Any = None, **ours: Any
    ) -> None:
        with open_dict(config):
            table = {"rollout_sched": {"poll_s": 0.1, **ours}}
            config.actor_rollout_ref.rollout.custom = OmegaConf.create(table)
        self.manager = manager_class.create(
            config=config,
            llm_client=llm_client,
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


def partial_rollout(folder: Path) -> str:
    """A policy that goes on from interrupted responses, and trains what is one version old."""
    policy = folder / "partial_rollout.toml"
    policy.write_text(
        '[batching]\nuse = "sync"\n\n[freshness]\nuse = "bounded"\nmax_staleness = 1\n'
        'when_stale = "mask"\n\n'
        '[interruption]\nuse = "partial"\nat_update = "in_place"\nkv = "recompute"\n\n'
        '[weights]\nuse = "all_at_once"\n'
    )
    return str(policy)


def generated(ours) -> list[float]:
    """Tokens that each instance has made."""
    return [instance.metric("vllm:generation_tokens_total") for instance in ours.instances]


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
        trainer = Trainer(config, ScheduledAgentLoopManager, gateway=ours.url)
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
    policy = partial_rollout(tmp_path)
    # 200 tokens take some 8 s, so that the weights come in the middle of them; on a machine that
    # stands still for so long, in the middle of the next ones.
    slow = ["--speed", "0.25", "--median-tokens", "200", "--sigma", "0.1", "--vocab-size", "256"]
    with servers.fleet(2, policy=policy, fake=slow, serve=SERVE) as ours:
        trainer = Trainer(config, ScheduledAgentLoopManager, gateway=ours.url)
        spans: set[tuple[int, int]] = set()
        for version in range(1, 6):
            before = generated(ours)
            trainer.submit([f"a{version}", f"b{version}"], version)
            wait_until(
                lambda before=before: all(map(operator.gt, generated(ours), before)),
                "every instance makes tokens",
            )
            publish(ours, version)
            made = trainer.sample(version, 2)
            check_rows(made)
            spans = {(tag["min_global_steps"], tag["max_global_steps"]) for tag in made.tags}
            if (version - 1, version) in spans:
                return
            trainer.clear(made)
        pytest.fail(f"five times the weights came too late: {spans}")


def test_verls_loops_may_stay_with_a_gateway_for_each_turn(servers, queue, config):
    with servers.fleet(2, policy="dplb", fake=FAKE) as ours:
        trainer = Trainer(config, GatewayAgentLoopManager, gateway=ours.url)
        trainer.submit(["a", "b"], 1)
        made = trainer.sample(1, 2)
        assert len(made.keys) == 6
        check_rows(made, version=0)


class Servers:
    """verl's, made of actors, and what its checkpoint engine does to them."""

    def __init__(self, engine: Any, number: int) -> None:
        self.actors = {f"127.0.0.1:{n}": engine.EngineServer.remote() for n in range(number)}

    def call(self, method: str, *arguments: Any) -> list[Any]:
        calls = [getattr(server, method).remote(*arguments) for server in self.actors.values()]
        return ray.get(calls, timeout=PATIENCE_S)

    def wait_until_running(self, requests: int) -> None:
        wait_until(lambda: sum(self.call("running")) == requests, f"{requests} requests run")

    def update(self, version: int) -> None:
        """As `CheckpointEngineManager.update_weights`."""
        self.call("abort_all_requests")
        self.call("set_global_steps", version)
        self.call("resume_generation")


def test_verls_own_servers_are_scheduled_and_its_updates_followed(engine, queue, config, tmp_path):
    """verl aborts what runs, loads its weights and lets its servers go on: responses go on from
    what they had, say which version made which token, and train none that is too old."""
    servers, half = Servers(engine, 2), engine.HALF
    servers.call("reset", 4)
    balancer = get_router_handle(servers.actors)
    trainer = Trainer(
        config,
        ScheduledAgentLoopManager,
        llm_client=LLMServerClient(config, balancer),
        policy=partial_rollout(tmp_path),
    )
    trainer.submit(["a", "b"], 5)
    servers.wait_until_running(6)
    servers.update(5)
    servers.call("let_go")
    made = trainer.sample(5, 2)
    check_rows(made)
    assert len(made.keys) == 6
    assert {(tag["min_global_steps"], tag["max_global_steps"]) for tag in made.tags} == {(4, 5)}
    for extra in read(made, ["extra_fields"])["extra_fields"]:
        assert extra["versions"] == [4] * half + [5] * (RESPONSE_LENGTH - half)

    servers.call("reset", 5)
    trainer.clear(made)
    trainer.submit(["c", "d"], 6)
    for version in (6, 7):
        servers.wait_until_running(6)
        servers.update(version)
    ray.get(balancer.remove_servers.remote(["127.0.0.1:0"]), timeout=PATIENCE_S)
    servers.call("let_go")
    made = trainer.sample(6, 2)
    assert {(tag["min_global_steps"], tag["max_global_steps"]) for tag in made.tags} == {(6, 7)}
    for mask in read(made, ["response_mask"])["response_mask"]:
        assert mask == [0] * half + [1] * (RESPONSE_LENGTH - half)


@pytest.mark.usefixtures("cluster")
def test_what_is_no_gateway_is_said_at_once(servers, config):
    with servers.fake_instance() as instance, pytest.raises(Exception, match="not a gateway"):
        Trainer(config, ScheduledAgentLoopManager, gateway=instance.url)
