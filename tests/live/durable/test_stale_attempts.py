"""Attempts of an earlier run are told to stop once their instance is here."""

from __future__ import annotations

from rollout_sched import load_policy
from rollout_sched.live.driver import Driver
from rollout_sched.live.durable.run import StaleAttempts
from rollout_sched.live.ports import InstanceError
from tests.live.scripted import Scripted, until


class Deaf(Scripted):
    async def abort(self, order_id: str) -> None:
        await super().abort(order_id)
        raise InstanceError("no")


async def test_each_is_aborted_once_where_it_was(caplog):
    driver = Driver(load_policy("dplb").scheduler(1))
    stale = StaleAttempts(driver, "old", [("i0", 3), ("i0", 4), ("gone", 5)])
    instance, other = Deaf("i0"), Scripted("i1")
    await driver.add_instance(instance)
    await driver.add_instance(other)
    await until(lambda: len(instance.calls) >= 3)
    aborts = [call for call in instance.calls if call[0] == "abort"]
    assert aborts == [("abort", "old-3"), ("abort", "old-4")]
    assert not any(call[0] == "abort" for call in other.calls)
    stale.close()
    await driver.close()
    assert "old-3 of an earlier run on i0: no" in caplog.text
