"""Statistics that are not read off a table: likeness within groups."""

import numpy as np
import pytest

from rollout_sched.simulators.traces.lengths import intraclass_correlation


class TestIntraclassCorrelation:
    def test_the_textbook_value(self) -> None:
        # Shrout and Fleiss (1979), table 4: six targets, four judges, ICC(1,1) = 0.17.
        ratings = [
            [9, 2, 5, 8],
            [6, 1, 3, 2],
            [8, 4, 6, 8],
            [7, 1, 2, 6],
            [10, 5, 6, 9],
            [6, 2, 4, 7],
        ]
        values = np.array(ratings, dtype=np.float64).ravel()
        found = intraclass_correlation(values, np.repeat(np.arange(6), 4))
        assert found == pytest.approx(0.17, abs=0.005)

    def test_undefined_without_repeats_or_variance(self) -> None:
        assert intraclass_correlation(np.array([1.0, 2.0]), np.array([0, 1])) is None
        assert intraclass_correlation(np.array([1.0, 2.0]), np.array([0, 0])) is None
        assert intraclass_correlation(np.ones(4), np.array([0, 0, 1, 1])) is None
