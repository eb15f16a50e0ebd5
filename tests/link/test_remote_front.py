"""A front follows only orders of its scheduler's current epoch, and ends if it cannot."""

from __future__ import annotations

from rollout_sched.core.model.actions import Dispatch
from rollout_sched.link.protocol import Orders, encode
from tests.link.stage import Stage, run
from tests.live.scripted import until


def test_orders_of_an_older_epoch_are_refused() -> None:
    async def scene() -> None:
        async with Stage(1) as stage:
            caller = stage.ask()
            remote = stage.fronts[0].remote
            late = Dispatch(stage.request, 77, "i0", 3, 9, 0)
            remote.receive(encode(Orders("old", 1, [late])))
            assert remote.refused == 1
            await stage.instance.answer(0, [7])
            await until(lambda: caller.heard)
            assert [order.id for order in stage.instance.orders.values()] == ["run-1"]

    run(scene)


def test_a_front_that_cannot_do_what_it_is_told_ends() -> None:
    async def scene() -> None:
        async with Stage(1) as stage:
            joined = stage.fronts[0]
            stage.ask()
            unknown = Dispatch(stage.request, 77, "nowhere", 3, 9, 0)
            joined.connected.order(unknown)
            joined.connected.order(unknown)
            await until(lambda: joined.broken)
            assert [type(error) for error in joined.broken] == [KeyError]
            try:
                stage.ask()
            except KeyError:
                pass
            else:
                raise AssertionError("it takes requests")

    run(scene)
