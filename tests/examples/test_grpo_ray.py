"""The policy of the example on Ray; the example itself is `make example-ray`."""

from __future__ import annotations

from pathlib import Path

from examples import grpo_tiny
from rollout_sched.config import load_policy
from rollout_sched.live.trainer.rewards import reward_settings_of

POLICY = Path(grpo_tiny.__file__).with_name("grpo_ray.toml")


def test_it_rewards_as_the_other_examples_do() -> None:
    policy = load_policy(str(POLICY), allow_code=True)
    policy.build(lengths=lambda group, index: 0)
    use = reward_settings_of(policy).use
    assert use == f"{grpo_tiny.__name__}:{grpo_tiny.reward.__name__}"
