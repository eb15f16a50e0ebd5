"""A step of the table."""

from benchmarks.recorded import Case, measured, truth


def test_a_policy_that_cuts_nothing_hides_nothing() -> None:
    case = Case("lrm_token_economy", "areal", steps=2)
    delivered, submitted = measured(case)
    assert submitted == truth(case)[0]
    assert delivered.step_s < submitted.step_s
