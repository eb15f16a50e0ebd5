"""A calibration finds the constants of an instance again, and says what it could not tell."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from rollout_sched.calibration.bursts import Burst, BurstTime
from rollout_sched.calibration.calibration import Calibration, Measurements, spread
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.vllm import EngineLimits
from rollout_sched.live.ports import OnTokens, Order, Output
from rollout_sched.simulators.instance.model import CostModel, InstanceSpec, Speculation
from rollout_sched.simulators.instance.step_time import StepTime
from tests.calibration import virtual
from tests.calibration.virtual import COST, LIMITS, SPEC

change = msgspec.structs.replace
H100_7B = CostModel(0.6e-3, 5.95e-3, 23.1e-6, 1.6, 4.4e-6, 26.3e-9, 0.8e-9)


def test_the_constants_of_an_instance_are_found_again() -> None:
    found = virtual.calibrated()
    for name in ("token_s", "context_s", "attention_s", "sequence_s", "request_s", "prefill_s"):
        assert getattr(found.fit.cost, name) == pytest.approx(getattr(COST, name), rel=0.05), name
    together = found.fit.cost.step_s + found.fit.cost.weights_s
    assert together == pytest.approx(COST.step_s + COST.weights_s, rel=0.02)
    assert found.fit.max_error < 0.01
    assert found.whole


@pytest.mark.parametrize("cost", [COST, H100_7B], ids=["ours", "h100"])
def test_any_step_is_foretold_within_two_per_cent(cost: CostModel) -> None:
    spec = change(SPEC, cost=cost, max_num_seqs=64, max_num_batched_tokens=8192)
    limits = change(LIMITS, max_num_batched_tokens=8192)
    found = StepTime(virtual.calibrated(spec, limits=limits).fit.cost)
    true = StepTime(cost)
    for sequences in (1, 7, 40, 64):
        for context in (50, 900, 1500):
            step = (sequences, sequences, sequences * context, 0.0, 0)
            assert found.step(*step) == pytest.approx(true.step(*step), rel=0.02), step
    for tokens in (100, 1000, 8000):
        step = (0, tokens, 0, tokens * tokens / 2, 1)
        assert found.step(*step) == pytest.approx(true.step(*step), rel=0.02), step


async def test_answer_overhead_is_kept_out_of_the_step_constants() -> None:
    """A server that writes them one after the other, 100 us for each token: as long for the last
    step's answers of a burst as a third of its steps. Other constants must not have that."""
    server, writes = virtual.instance(), asyncio.Lock()
    generate = server.generate

    async def written(order: Order, on_tokens: OnTokens | None = None) -> Output:
        output = await generate(order, on_tokens)
        async with writes:
            await asyncio.sleep(100e-6 * len(output.token_ids))
        return output

    server.generate = written  # type: ignore[method-assign]
    found = await virtual.calibrator(server).run(120)
    assert found.writing_s == pytest.approx(100e-6, rel=0.05)
    for name in ("sequence_s", "context_s"):
        assert getattr(found.fit.cost, name) == pytest.approx(getattr(COST, name), rel=0.15), name
    together = found.fit.cost.step_s + found.fit.cost.weights_s
    assert together == pytest.approx(COST.step_s + COST.weights_s, rel=0.02)


@pytest.mark.parametrize(
    "drafts",
    [
        Speculation(4, 0.6, schedule="always", draft_share=0.1),
        Speculation(2, 0.25, "ngram", schedule="always"),
        Speculation(3, 1.0, schedule=((1, 6, 3), (7, 14, 1), (15, 32, 0)), draft_share=0.05),
    ],
    ids=["model", "ngram", "thin"],
)
async def test_the_drafts_of_an_instance_are_found_again(drafts: Speculation) -> None:
    """Within 1 % of acceptance, and 0.01 of the share."""
    server = virtual.instance(change(SPEC, speculation=drafts))
    _, served, found = await virtual.calibrator(server).drafts(COST, 30)
    assert not served.drafts
    assert found.speculation.tokens == drafts.tokens
    assert found.speculation.acceptance == pytest.approx(drafts.acceptance, rel=0.01)
    assert found.speculation.draft_cost == pytest.approx(drafts.draft_cost, abs=0.01)
    assert max(map(abs, found.errors)) < 0.02
    for batch in (1, 6, 13, 32):  # of those that were measured
        assert found.speculation.choices(batch) == drafts.choices(batch)


async def test_drafts_are_measured_against_the_same_server_without() -> None:
    drafting = virtual.instance(change(SPEC, speculation=Speculation(2, 0.5)))
    with pytest.raises(CallerError, match="--base FILE"):
        await virtual.calibrator(drafting).run(10)
    with pytest.raises(CallerError, match="without --base"):
        await virtual.calibrator(virtual.instance()).drafts(COST, 10)


def test_calibration_has_reported_limits_and_measured_features() -> None:
    found = virtual.calibrated()
    assert (found.room.slots, found.room.kv_tokens) == (32, 65536)
    assert found.prefix_caching is True
    assert found.pause_s is not None
    assert found.reload_s is None


def test_a_cache_that_is_off_is_seen() -> None:
    found = virtual.calibrated(change(SPEC, prefix_caching=False), limits=EngineLimits())
    assert found.prefix_caching is False


def test_a_small_server_is_measured_within_its_room() -> None:
    small = InstanceSpec(COST, 40, 16, 4, 512, 128)
    found = virtual.calibrated(small)
    assert found.fit.max_error < 0.02
    assert found.context <= 640


def test_a_server_without_room_for_anything_is_refused() -> None:
    tiny = InstanceSpec(COST, 40, 16, 4, 512, 48)
    with pytest.raises(CallerError, match="--max-model-len"):
        virtual.calibrated(tiny)


async def test_paused_server_is_refused() -> None:
    server = virtual.instance()
    await server.pause("keep", False)
    described = change(await server.describe(), paused=True)

    async def describe() -> object:
        return described

    server.describe = describe  # type: ignore[method-assign, assignment]
    with pytest.raises(CallerError, match="resume it"):
        await virtual.calibrator(server).run(10)


async def test_instances_that_are_not_alike_are_refused() -> None:
    servers = [virtual.instance(), virtual.instance(change(SPEC, max_num_seqs=8), "small")]
    with pytest.raises(CallerError, match=r"small .* differs from fake"):
        await virtual.calibrator(*servers).run(10)


async def test_several_are_measured_at_once() -> None:
    found = await virtual.calibrator(*(virtual.instance(name=name) for name in ("one", "two"))).run(
        60
    )
    assert found.instances == 2
    assert found.fit.max_error < 0.01


async def test_earlier_bursts_are_measured_again() -> None:
    """Also with less time, in which other bursts would be chosen: each is seen by both, so that a
    machine that is slower by now does not make some of them longer than the others."""
    measurements, server = Measurements(), virtual.instance()
    first = await virtual.calibrator(server, measurements=measurements).run(60)
    often = {burst: len(times) for burst, times in measurements.times.items()}
    second = await virtual.calibrator(server, seed=2, measurements=measurements).run(5)
    assert second.bursts == first.bursts == len(often)
    assert all(len(measurements.times[burst]) > times for burst, times in often.items())
    assert second.whole
    assert second.fit.max_error < 0.01


@pytest.mark.parametrize(
    ("loads_s", "median_s", "times"), [((0.4, 0.1, 0.1, 0.1, 0.1), 0.1, 5), ((6.0,), 6.0, 1)]
)
async def test_a_checkpoint_that_loads_quickly_is_loaded_again(
    loads_s: tuple[float, ...], median_s: float, times: int
) -> None:
    """The first load may be slower than those that follow in a training."""
    server, left = virtual.instance(), list(loads_s)
    described = await server.describe()
    able = change(described, capabilities=described.capabilities | {"collective_rpc"})

    async def describe() -> object:
        return able

    async def collective_rpc(*_: object, **__: object) -> None:
        await asyncio.sleep(left.pop(0))

    server.describe = describe  # type: ignore[method-assign, assignment]
    server.collective_rpc = collective_rpc  # type: ignore[method-assign]
    found = await virtual.calibrator(server).run(10, "/checkpoint")
    assert found.reload_s == pytest.approx(median_s, abs=0.05)
    assert len(loads_s) - len(left) == times


def interrupted_after(seconds: float) -> Calibration:
    async def scene() -> Calibration:
        task = asyncio.ensure_future(virtual.calibrator(virtual.instance()).run(600))
        await asyncio.sleep(seconds)
        task.cancel()
        return await task

    return virtual.in_virtual_time(scene)


def test_an_interrupt_leaves_what_is_known() -> None:
    found = interrupted_after(20)
    assert not found.whole
    assert found.bursts >= 10
    assert found.fit.cost.context_s == pytest.approx(COST.context_s, rel=0.2)


def test_an_interrupt_before_anything_is_known_is_one() -> None:
    with pytest.raises(asyncio.CancelledError):
        interrupted_after(1)


async def test_a_server_that_serves_others_all_the_time_is_refused() -> None:
    server = virtual.instance()
    order = Order("theirs", [1, 2, 3], 16000, "", {"ignore_eos": True})
    theirs = asyncio.ensure_future(server.generate(order))
    await asyncio.sleep(0.1)
    with pytest.raises(CallerError, match=r"busy with other requests \(1 running"):
        await virtual.calibrator(server).run(60)
    theirs.cancel()


def test_a_neighbour_who_disturbs_once_changes_nothing() -> None:
    measurements = Measurements()
    for seconds in (1.0, 1.02, 9.0):
        measurements.add(Burst(1, 32, 8), [BurstTime(seconds, seconds)])
    assert measurements.medians == {Burst(1, 32, 8): 1.02}


def test_unmeasured_bursts_are_left_out() -> None:
    measurements = Measurements()
    measurements.add(Burst(1, 32, 8), [])
    assert measurements.whole == {}
    assert measurements.spread is None


def test_the_spread_is_half_the_quartiles_distance() -> None:
    assert spread([[0.9, 1.0, 1.1], [1.0, 1.0, 1.0], [0.8, 1.0, 1.2]]) == pytest.approx(0.05)
    assert spread([[1.0, 2.0]]) is None


def test_steps_of_a_constant_time() -> None:
    measurements = Measurements()
    for batch in (1, 4):
        for new in (1, 9):
            time = BurstTime(0.01 * new, 0.01 * new)
            measurements.add(Burst(batch, 32, new), [time])
    fit = measurements.fit(8, 2048)
    assert fit.max_error < 1e-6
    assert fit.cost.step_s + fit.cost.weights_s == pytest.approx(0.01)
