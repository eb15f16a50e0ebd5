"""What of bodies is here, and what finds no room."""

from __future__ import annotations

from rollout_sched.integrations.http.bodies import BodyBudget


def test_who_finds_no_room_is_told_to_come_back_and_counted():
    budget = BodyBudget(100)
    budget.used = 90
    refusals = [budget.full(), budget.full()]
    assert [refusal.status for refusal in refusals] == [503, 503]
    assert "90 bytes" in str(refusals[0])
    assert (budget.refused, budget.used) == (2, 90)
