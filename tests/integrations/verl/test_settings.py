"""What verl's configuration says of us."""

from __future__ import annotations

import pytest

from rollout_sched.config import ConfigError
from rollout_sched.integrations.verl.settings import WHERE, settings_of

GATEWAY = "http://127.0.0.1:8000"


def table(**keys: object) -> dict[str, object]:
    return {"rollout_sched": {"gateway": GATEWAY, **keys}}


def test_the_table_is_read_and_others_are_left_alone():
    settings = settings_of({"somebody": {"else": 1}, **table(poll_s=2)})
    assert (settings.gateway, settings.poll_s) == (GATEWAY, 2.0)
    assert settings.api_key is None
    assert settings.trainer_key is None


@pytest.mark.parametrize(
    ("custom", "says"),
    [
        (None, "is missing"),
        ({}, "is missing"),
        ({"rollout_sched": {}}, "gateway"),
        (table(policy="dplb"), "either"),
        ({"rollout_sched": {"ray": "rollout", "policy": "dplb"}}, "either"),
        (table(gatway="x"), "gatway"),
        (table(poll_s=0), "poll_s"),
    ],
)
def test_a_faulty_setting_is_named_with_its_place(custom, says):
    with pytest.raises(ConfigError, match=says) as error:
        settings_of(custom)
    assert str(error.value).startswith(WHERE)


def test_turns_need_a_gateway_and_groups_do_not():
    settings = settings_of({"rollout_sched": {"policy": "dplb"}})
    assert settings.policy == "dplb"
    with pytest.raises(ConfigError, match="gateway"):
        _ = settings.gateway_url
    assert settings_of({"rollout_sched": {"gateway": "http://a:1/"}}).gateway_url == "http://a:1"


def test_a_deployment_on_ray_may_have_a_front_for_what_is_no_group():
    settings = settings_of({"rollout_sched": {"ray": "rollout"}})
    assert settings.ray == "rollout"
    with pytest.raises(ConfigError, match="single turns need one"):
        _ = settings.gateway_url
    assert settings_of(table(ray="rollout")).gateway_url == GATEWAY


def test_keys_come_from_the_first_line_that_is_none_of_comment_and_blank(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# the trainer's\n\n secret \nother\n")
    assert settings_of(table(trainer_key_file=str(keys))).trainer_key == "secret"
    keys.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="the file has no key"):
        _ = settings_of(table(api_key_file=str(keys))).api_key
    with pytest.raises(ConfigError, match="api_key_file"):
        _ = settings_of(table(api_key_file=str(tmp_path / "away"))).api_key
