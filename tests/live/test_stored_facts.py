"""Facts as a store holds them."""

from __future__ import annotations

from rollout_sched.core.model.actions import Deliver
from rollout_sched.core.model.records import DeliveredSample, Segment
from rollout_sched.live.durable import records as facts
from rollout_sched.live.durable.records import StoredPrompt
from rollout_sched.live.trainer.samples import Prompt
from rollout_sched.store.transaction import decode


def test_a_prompt_is_a_fact_and_its_tokens_are_a_piece():
    prompt = Prompt("a", list(range(1000)), 2, 9, {"logprobs": 0}, extra={"answer": [1, {}]})
    fact, tokens = facts.encoded_prompt(prompt, tool="search")
    assert len(fact) < 200
    assert decode(tokens).ids == prompt.prompt_ids
    stored = facts.decoded(fact, StoredPrompt)
    assert (stored.tool, stored.tool_name) == (True, "search")
    _, without = facts.encoded_prompt(prompt, tool=None)
    assert without == tokens
    assert stored.prompt.prompt_ids == [0]
    assert (stored.prompt.extra, stored.prompt.sampling) == (prompt.extra, prompt.sampling)


def test_a_delivery_comes_back_as_it_was():
    sample = DeliveredSample("a/0", "a", 0, 3, 2, (Segment(1, 2, "i0"),), 1, "stop")
    action = Deliver(4, 2, (sample,), 1, False)
    assert facts.decoded(facts.encoded(action), Deliver) == action
    assert facts.delivery_name(action) == "4.1"


def test_the_owner_of_a_prompts_tokens_is_told_from_a_requests():
    owner = facts.prompt_owner("p:a/0")
    assert facts.uid_of_owner(owner) == "p:a/0"
    assert facts.uid_of_owner("r:p:a/0") is None


def test_a_loss_is_named_by_its_group_and_by_the_batch_that_tells_it():
    names = [facts.loss_name("a:1", batch) for batch in (None, 4)]
    assert names == [":a:1", "4:a:1"]
    assert [facts.lost_group(name) for name in names] == ["a:1", "a:1"]
