"""What a deployment is called, and what it takes along."""

from __future__ import annotations

from pathlib import Path

from rollout_sched.config import load_policy
from rollout_sched.integrations.ray.deployment import Deployment, PolicyText


def test_deployments_of_other_names_share_nothing() -> None:
    one, other = Deployment(name="one"), Deployment(name="other")
    names = [one.scheduler, one.front("node"), one.front(0), one.front(1)]
    names += [other.scheduler, other.front("node"), other.front(0), other.front(1)]
    assert len(set(names)) == len(names)


def test_a_policy_file_goes_where_the_scheduler_is(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (here / "mine.toml").write_text('[routing]\nuse = "least_tokens"\n')
    text = PolicyText.read(str(here / "mine.toml"))
    assert text is not None
    loaded = load_policy(str(text.write(there)))
    assert loaded.name == load_policy(str(here / "mine.toml")).name
    assert loaded.roles["routing"] == load_policy(str(here / "mine.toml")).roles["routing"]


def test_a_preset_is_there_already() -> None:
    assert PolicyText.read("dplb") is None
