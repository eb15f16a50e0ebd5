"""verl's dumps, and what counts their tokens."""

from __future__ import annotations

from pathlib import Path

from rollout_sched.simulators.traces import Counting
from tests.simulators.traces.imported import imported


class TestVerlDumps:
    def test_groups_by_input_within_a_step(self, tmp_path: Path) -> None:
        lines = [
            '{"input":"abc","output":"xxxxxxx","step":1,"score":0.5}',
            '{"input":"abc","output":"","step":1}',
            '{"input":"abc","output":"x","step":2}',
            '{"input":"def","output":"x","step":2}',
        ]
        trace = imported(tmp_path, "\n".join(lines))
        assert [len(members) for members in trace.groups.values()] == [2, 1, 1]
        first, second = next(iter(trace.groups.values()))
        assert (first.prompt_tokens, first.response_tokens) == (1, 3)
        assert first.labels == {
            "step": "1",
            "score": "0.5",
            "tokens_counted_by": "characters / 3.3",
        }
        assert second.response_tokens == 1

    def test_groups_by_uid_and_counts_with_a_tokenizer(self, tmp_path: Path) -> None:
        lines = '{"input":"a b","output":"c d e","uid":"u"}\n{"input":"z","output":"y","uid":"u"}'
        trace = imported(tmp_path, lines, Counting(tokenizer=lambda text: len(text.split())))
        first = trace.groups["u"][0]
        assert len(trace.groups["u"]) == 2
        assert (first.prompt_tokens, first.response_tokens) == (2, 3)
        assert first.labels["tokens_counted_by"] == "tokenizer"
