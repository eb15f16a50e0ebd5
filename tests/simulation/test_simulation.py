"""The seeds that have found bugs, and tests that the laws detect bugs."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from rollout_sched.client.remote import calls
from rollout_sched.integrations.gateway.data_plane.data_plane import DataPlane
from rollout_sched.integrations.gateway.data_plane.reply import OpenCalls
from rollout_sched.live.instances.admission import RequiredModel
from rollout_sched.live.instances.fleet import LiveFleet
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.live.requests.trajectories import TrajectoryPayload
from rollout_sched.live.trainer import rewards as reward_function
from rollout_sched.live.trainer.delivery import BatchDelivery, Leases
from rollout_sched.live.trainer.samples import Reward
from rollout_sched.live.trainer.session import TrainerSession
from rollout_sched.live.trainer.stored import StoredSession
from rollout_sched.live.trainer.submissions import AcknowledgedGroups, Submissions
from rollout_sched.simulators.fake_instance import answers as open_answers
from rollout_sched.store import store as store_module
from tests.simulation import faults, runner
from tests.simulation.models import OTHER
from tests.simulation.plan import draw
from tests.simulation.rewards import Rewards
from tests.simulation.runner import blame, check, delay, shrunk, told
from tests.simulation.tools import Tools
from tests.simulation.world import run

NAMED = tomllib.loads((Path(__file__).parent / "seeds.toml").read_text())["seeds"]

#: A plan without faults.
CALM = msgspec.structs.replace(
    draw(0),
    policy="round_robin_sync",
    groups=4,
    samples=2,
    prompts_per_step=2,
    max_tokens=100,
    parts=False,
    stream_every=0,
    durable="batch",
    versioned=True,
    instances=2,
    slots=16,
    kv_blocks=400,
    latency_s=0.03,
    train_s=0.0,
    calls=3,
    attacks=[],
    faults=[],
)

#: A machine that is gone for a while.
GONE = faults.GatewayDies(at_s=1.8, for_s=3.0, power="all")


def held(outcome):
    assert not outcome.broken, told(outcome)


@pytest.mark.parametrize("seed", [int(seed) for seed in NAMED])
def test_seeds_that_have_found_something(seed):
    held(check(seed))


def test_nobody_feels_what_hostile_clients_do():
    held(blame(draw(3)))


def test_a_seed_is_the_same_run_in_every_process():
    program = "from tests.simulation.world import run\nfrom tests.simulation.plan import draw\n"
    program += "print([run(draw(seed)).journal for seed in (4, 5)])"
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(said) == 1


def with_faults(*befall):
    return msgspec.structs.replace(CALM, train_s=0.3, faults=list(befall))


def test_a_run_that_nothing_befalls():
    held(run(CALM))
    held(run(with_faults(GONE)))


def test_a_token_that_is_another_is_seen(monkeypatch):
    made = open_answers.OpenAnswers._text

    def text(*about):
        ids, logprobs = made(*about)
        return [token ^ (place == 3) for place, token in enumerate(ids)], logprobs

    monkeypatch.setattr(open_answers.OpenAnswers, "_text", text)
    assert "each token is the one that its version generates" in run(CALM).broken


def test_a_sample_of_two_models_is_seen(monkeypatch):
    mistake = faults.InstanceDies(
        at_s=1.8, for_s=8.0, instance=0, label="default", silently=False, model=OTHER
    )
    plan = msgspec.structs.replace(with_faults(mistake), instances=1, stream_every=1)
    held(run(plan))
    monkeypatch.setattr(LiveFleet, "required_model", lambda fleet, instance: RequiredModel())
    assert "each token is the one that its version generates" in run(plan).broken


def test_a_batch_that_comes_again_is_seen(monkeypatch):
    monkeypatch.setattr(BatchDelivery, "_acknowledge", lambda delivery, *arrived: None)
    dies = faults.TrainerDies(at_s=0.0, for_s=1.0, when="trained")
    assert "an acknowledged batch is never delivered again" in run(with_faults(dies)).broken


def test_a_group_that_is_trained_twice_is_seen(monkeypatch):
    dies = faults.TrainerDies(at_s=3.0, for_s=1.0, when="received")
    plan = msgspec.structs.replace(with_faults(dies), groups=8, open_s=12.0)
    held(run(plan))
    monkeypatch.setattr(AcknowledgedGroups, "add", lambda groups, batch, digests: [])
    assert "an acknowledged batch is never delivered again" in run(plan).broken


def test_a_row_that_is_left_is_seen(monkeypatch):
    monkeypatch.setattr(StoredSession, "acknowledged", lambda session, batch: None)
    assert "nothing is left in the store" in run(CALM).broken


def test_a_submission_that_is_forgotten_is_seen(monkeypatch):
    async def promise_nothing(session):
        """Reports data as durable although it is not."""

    monkeypatch.setattr(TrainerSession, "durable", promise_nothing)
    plan = msgspec.structs.replace(with_faults(), durable="batch", latency_s=0.0001)
    plan = msgspec.structs.replace(plan, faults=[msgspec.structs.replace(GONE, at_s=1.1)])
    assert "an accepted group is not forgotten" in run(plan).broken


#: A machine with a damaged disk.
ROT = faults.TokensRot(at_s=1.8, for_s=1.0, share=0.5)


def test_tokens_that_rot_are_made_anew_or_told():
    outcome = run(msgspec.structs.replace(with_faults(ROT), stream_every=4))
    held(outcome)
    assert any("rotten: ['" in line for line in outcome.told)


@pytest.mark.parametrize("kind", ["group", "prompt", "delivered"])
def test_rows_that_rot_are_told(kind):
    befall = faults.RowRots(at_s=3.0, for_s=1.0, kind=kind)
    plan = msgspec.structs.replace(with_faults(befall), stream_every=4, train_s=3.0, groups=8)
    outcome = run(plan)
    held(outcome)
    assert any(f"rotten: {kind} " in line for line in outcome.told)
    assert any("failed ['p" in line for line in outcome.told)


@pytest.mark.parametrize("at_s", [1.8, 2.0, 2.2])
def test_a_log_that_rots_is_refused_or_whole(at_s):
    outcome = run(with_faults(faults.LogRots(at_s=at_s, for_s=1.0)))
    held(outcome)
    assert any("the gateway cannot start: store" in line for line in outcome.told)


def test_tokens_that_rot_and_are_believed_are_seen(monkeypatch):
    monkeypatch.setattr(store_module, "_crc_of_piece", lambda owner, ordinal, data: 0)
    rot = msgspec.structs.replace(ROT, share=1.0)
    assert run(msgspec.structs.replace(with_faults(rot), stream_every=4)).broken


def test_a_call_left_open_is_seen(monkeypatch):
    monkeypatch.setattr(OpenCalls, "leave", lambda calls, reply, count, size: None)
    assert "nothing is left" in run(CALM).broken


def shared(*befall, **other):
    """A plan with two trainers."""
    return msgspec.structs.replace(with_faults(*befall), trainers=2, groups=8, train_s=3.0, **other)


def test_two_trainers_share_a_run():
    held(run(shared(lease_s=1.5)))
    dies = faults.TrainerDies(at_s=0.0, for_s=30.0, when="trained", trainer=1)
    outcome = run(shared(dies, lease_s=2.0))
    held(outcome)
    assert any("trainer 'trainer-0' has" in line for line in outcome.told), "it comes too late"


def test_three_trainers_share_a_run():
    dies = faults.TrainerDies(at_s=0.0, for_s=30.0, when="trained", trainer=2)
    outcome = run(msgspec.structs.replace(shared(dies, lease_s=2.0), trainers=3, groups=12))
    held(outcome)
    assert any("trainer 'trainer-2' ended" in line for line in outcome.told), "it comes too late"


def test_a_batch_that_two_trainers_have_is_seen(monkeypatch):
    monkeypatch.setattr(Leases, "free", property(lambda leases: sorted(leases._leases)))
    assert "no trainer takes a batch that another holds" in run(shared()).broken


def test_a_lease_that_ends_too_early_is_seen(monkeypatch):
    monkeypatch.setattr(Leases, "renew", lambda leases, trainer, now: None)
    assert "an active trainer keeps its batch" in run(shared(lease_s=2.0)).broken


#: All groups have different rewards.
JUDGED = Rewards("nonzero_variance", False, 0.2, equal=0.0, broken=0.0, concurrency=4)


def judged(rewards):
    return msgspec.structs.replace(CALM, rewards=rewards)


def test_samples_are_judged():
    held(run(judged(JUDGED)))
    held(run(judged(msgspec.structs.replace(JUDGED, equal=0.5, broken=0.2, in_thread=True))))


def test_a_reward_that_is_another_samples_is_seen(monkeypatch):
    monkeypatch.setattr(Submissions, "_reward", lambda submissions, request: Reward(7.0))
    assert "a sample has its own reward" in run(judged(JUDGED)).broken


def test_training_a_filtered_group_is_seen(monkeypatch):
    monkeypatch.setitem(reward_function.KEEPS, "nonzero_variance", lambda samples: True)
    assert (
        "only kept groups are trained"
        in run(judged(msgspec.structs.replace(JUDGED, equal=1.0))).broken
    )


def test_failed_groups_are_submitted_again():
    """The rewards of some groups always fail, so these groups fail each time."""
    rewards = msgspec.structs.replace(JUDGED, broken=0.5)
    outcome = run(msgspec.structs.replace(judged(rewards), groups=12, open_s=8.0))
    held(outcome)
    assert any("has submitted" in line for line in outcome.told)


def test_forgetting_a_resubmitted_group_is_seen(monkeypatch):
    submit = Submissions.submit

    def refuse(submissions, prompts, tool):
        return submit(submissions, [p for p in prompts if not submissions._loss(p.uid)], tool)

    monkeypatch.setattr(Submissions, "submit", refuse)
    plan = judged(msgspec.structs.replace(JUDGED, broken=0.5))
    broken = run(msgspec.structs.replace(plan, groups=12, open_s=8.0)).broken
    assert "every sample is accounted for" in broken


#: Trajectories of two turns.
ACTING = msgspec.structs.replace(
    CALM,
    in_process=True,
    calls=0,
    tools=Tools(share=1.0, named=1.0, turns=2, seconds=0.3, broken=0.0),
)


def test_trajectories_of_a_trainer_in_its_schedulers_process():
    held(run(ACTING))
    held(run(msgspec.structs.replace(ACTING, stream_every=1, faults=[GONE])))


def test_a_changed_tool_result_is_seen(monkeypatch):
    observe = TrajectoryPayload.observe

    def changed(payload, attempt, token_ids):
        observe(payload, attempt, [token + 1 for token in token_ids])

    monkeypatch.setattr(TrajectoryPayload, "observe", changed)
    assert "the output of a tool is kept" in run(ACTING).broken


@pytest.mark.parametrize("weights", ["around", "applied"])
def test_weights_around_us(weights):
    held(run(msgspec.structs.replace(CALM, weights=weights, groups=8, stream_every=4)))


def test_an_endless_wait_is_seen_and_its_plan_shrunk(monkeypatch):
    monkeypatch.setattr(calls, "ANSWER_S", None)
    slow = faults.InstanceIsSlow(at_s=1.0, for_s=0.5, instance=0, by=3.0)
    outcome = shrunk(with_faults(slow, GONE))
    assert "everything ends" in outcome.broken
    assert outcome.plan.faults == [GONE]
    assert outcome.plan.calls == 0
    assert "python -m tests.simulation 0" in told(outcome)


def test_a_client_that_makes_another_wait_is_seen(monkeypatch):
    handle = DataPlane.refusal

    def refusal(plane, method, target, fields):
        refused = handle(plane, method, target, fields)
        if refused is not None:
            plane.scheduling.submit(TokenPayload([1, 2], {}, responder=Nobody()), 2, 400)
        return refused

    monkeypatch.setattr(DataPlane, "refusal", refusal)
    assert "never changes another's answer" in blame(draw(3)).broken


def test_nobody_waits_for_long_because_of_another(monkeypatch):
    plan = msgspec.structs.replace(draw(9), instances=1, slots=1)
    held(delay(plan))
    monkeypatch.setattr(runner, "DELAY_S", 0.0)
    assert "no call waits long" in delay(plan).broken


class Nobody:
    """Waits for nothing."""

    def answer(self, sample): ...

    def fail(self, reason, error): ...
