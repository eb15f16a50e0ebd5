"""What a sample is: its lengths, and what a cap leaves of it."""

import pytest

from rollout_sched.simulators.traces import SampleRecord, Turn


class TestCutting:
    @pytest.mark.parametrize(
        ("cap", "turns"),
        [
            (1, (Turn(1),)),
            (7, (Turn(7),)),
            (8, (Turn(7, 2, 0.5), Turn(1))),
            (15, (Turn(7, 2, 0.5), Turn(8))),
        ],
    )
    def test_a_cap_cuts_the_turn_it_falls_into(self, cap: int, turns: tuple[Turn, ...]) -> None:
        sample = SampleRecord("g", 0, 5, (Turn(7, 2, 0.5), Turn(8)))
        cut = sample.cut_at(cap)
        assert cut.turns == turns
        assert cut.response_tokens == cap
        assert cut.finish == ("stop" if cap == 15 else "length")
