"""Samples as columns, keys and tags."""

from __future__ import annotations

from msgspec.structs import replace

from rollout_sched.integrations.transfer_queue import columns
from rollout_sched.live.trainer.samples import Batch, Sample, Span
from tests.integrations.samples import make_sample


def sample(index: int, response: list[int], *, logprob: float | None = -1.0) -> Sample:
    spans = [Span(4, "http://a", 0, len(response))]
    return make_sample("a", index, response, spans=spans, logprob=logprob, extra={"answer": 42})


def test_a_tag_says_what_can_be_chosen_by():
    one = sample(3, [5, 6, 7])
    assert columns.key_of(one) == "a_3_0"
    assert columns.tag_of(one, Batch(9, 5, [one])) == {
        "status": "success",
        "prompt_len": 2,
        "response_len": 3,
        "seq_len": 5,
        "global_steps": 5,
        "min_global_steps": 4,
        "max_global_steps": 4,
        "staleness": 1,
        "batch": 9,
    }


def test_every_column_has_a_row_for_each_sample():
    samples = [sample(0, [5, 6]), sample(1, [7])]
    tokens = columns.ragged(samples)
    assert tokens["input_ids"] == [[1, 2, 5, 6], [1, 2, 7]]
    assert tokens["position_ids"] == [[0, 1, 2, 3], [0, 1, 2]]
    assert tokens["loss_mask"] == tokens["response_mask"] == [[1, 1], [1]]
    assert columns.objects(samples)["extra"] == [{"answer": 42}] * 2


def test_log_probs_are_there_where_every_sample_has_them():
    both = [sample(0, [5], logprob=-2.0), sample(1, [7])]
    assert columns.log_probs(both) == {"rollout_log_probs": [[-2.0], [-1.0]]}
    assert columns.log_probs([*both, sample(2, [8], logprob=None)]) == {}


def test_a_reward_stands_at_the_last_token_where_every_sample_has_one():
    one, other = sample(0, [5, 6, 7]), sample(1, [])
    assert columns.scores([one, other]) == {}
    both = [replace(one, reward=0.5, rewards={"answer": 0.5}), replace(other, reward=1.0)]
    assert columns.scores(both) == {"rm_scores": [[0.0, 0.0, 0.5], []]}
    assert columns.objects(both)["rewards"] == [{"answer": 0.5}, {}]
