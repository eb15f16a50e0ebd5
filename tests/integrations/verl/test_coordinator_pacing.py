"""When verl's trainer is given another batch, by what stands in TransferQueue."""

from __future__ import annotations

import pytest

from rollout_sched.integrations.verl.coordinator import asks_for_more, still_given


def group(status: str) -> dict[str, object]:
    return {"is_prompt": True, "status": status, "global_steps": 1}


SAMPLE = {"status": "success"}


@pytest.mark.parametrize(
    ("tags", "given", "more"),
    [
        ({}, (), True),
        ({"a": group("pending"), "b": group("running")}, (), True),
        # delivered, their sessions still at work
        ({"a": group("running"), "b": group("running")}, ("a", "b"), False),
        ({"a": group("running"), "a_0_0": SAMPLE, "b": group("running")}, ("a",), True),
        # for the trainer to take
        ({"a": group("finished"), "a_0_0": SAMPLE, "b": group("failure")}, (), False),
        # taken: it has cleared the group's key, and trains on the samples
        ({"a_0_0": SAMPLE, "a_1_0": SAMPLE, "b_0_0": SAMPLE}, (), False),
        # one was thrown away, with its samples
        ({"a": group("finished"), "a_0_0": SAMPLE}, (), True),
        # samples that verl makes up to fill its ranks are nobody's group
        ({"a_0_0": SAMPLE, "pad1_0_0": {"is_padding": True}}, (), True),
        # the step is over and its samples are cleared
        ({"c": group("running")}, ("a", "b"), True),
    ],
)
def test_a_batch_is_asked_for_when_the_trainer_has_less_than_its_groups(tags, given, more):
    assert asks_for_more(tags, given, 2) is more


def test_a_group_is_given_until_it_is_settled():
    tags = {"a": group("running"), "b": group("finished")}
    assert still_given(tags, {"a", "b", "c"}) == {"a"}
