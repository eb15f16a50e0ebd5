"""New weights on their way: every plan takes what its closed form says."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.config import ConfigError
from rollout_sched.core.model.actions import UpdateWeights
from rollout_sched.core.model.events import WeightsPublished, WeightsUpdated
from rollout_sched.simulators.replay.event_queue import EventQueue
from rollout_sched.simulators.replay.links import NetworkLink, SimWeights, TransferCost
from rollout_sched.simulators.replay.runs import WeightFigures, run_policy
from rollout_sched.simulators.replay.scenario import Scenario, load_scenario, parse_scenario
from tests.helpers import make_policy, make_scenario, make_trace, watch

EXACT = 1e-9
SIZES = st.floats(1e6, 1e12)
RATES = st.floats(1e8, 1e11)
SECONDS = st.floats(0.0, 30.0)


class Fleet:
    """Instances that are all told to load version 1 at once, or each at its time."""

    def __init__(
        self, cost: TransferCost, network: tuple[NetworkLink, ...], instances: int
    ) -> None:
        self.queue = EventQueue()
        self.names = [str(number) for number in range(instances)]
        self.weights = SimWeights(cost, network, self.names, self.names, self.queue)
        self.published_at = math.nan
        self.loaded: dict[str, float] = {}

    def update(self, times: list[float] | None = None) -> list[float]:
        """When each instance has its new weights; `times` are those of the orders, all at the
        publication if left out."""
        orders = dict(zip(self.names, times or [], strict=False))

        def order(name: str) -> None:
            self.weights.load(name, 1, self._loaded, name)

        def published(version: int) -> None:
            self.published_at = self.queue.now
            for name in self.names:
                if name in orders:
                    self.queue.at(orders[name], order, name)
                else:
                    order(name)

        self.weights.publish(1, published)
        while len(self.queue):
            self.queue.step()
        return [self.loaded[name] for name in self.names]

    def _loaded(self, name: str) -> None:
        self.loaded[name] = self.queue.now


def on_one_link(cost: TransferCost, rate: float, instances: int, *, shared: bool = True) -> Fleet:
    return Fleet(cost, (NetworkLink("nic", rate, shared),), instances)


@given(st.integers(1, 40), SIZES, RATES, SECONDS, SECONDS)
def test_a_star_shares_the_trainers_link(
    instances: int, size: float, rate: float, convert_s: float, fixed_s: float
) -> None:
    cost = TransferCost(fixed_s, size, convert_s=convert_s)
    shared = on_one_link(cost, rate, instances)
    rest_s = convert_s + fixed_s
    assert shared.update() == pytest.approx([rest_s + instances * size / rate] * instances, EXACT)
    assert shared.weights.sent_bytes == {"nic": pytest.approx(instances * size)}
    alone = on_one_link(cost, rate, instances, shared=False)
    assert alone.update() == pytest.approx([rest_s + size / rate] * instances, EXACT)


@given(st.integers(1, 40), st.integers(1, 30), st.floats(1e6, 1e10), RATES, SECONDS)
def test_a_chain_is_a_pipeline_of_buckets(
    instances: int, buckets: int, bucket: float, rate: float, fixed_s: float
) -> None:
    cost = TransferCost(fixed_s, buckets * bucket, plan="chain", bucket_bytes=bucket)
    fleet = on_one_link(cost, rate, instances)
    expected = [fixed_s + (buckets + hop) * bucket / rate for hop in range(instances)]
    assert fleet.update() == pytest.approx(expected, EXACT)
    assert fleet.weights.sent_bytes == {"nic": pytest.approx(buckets * bucket)}


@given(st.integers(1, 200), st.integers(1, 30), st.floats(1e6, 1e10), RATES)
def test_a_tree_is_as_deep_as_the_logarithm(
    instances: int, buckets: int, bucket: float, rate: float
) -> None:
    """Each sends to two at half the rate; the trainer is the root."""
    cost = TransferCost(0.0, buckets * bucket, plan="tree", bucket_bytes=bucket)
    depths = [math.floor(math.log2(number + 1)) for number in range(1, instances + 1)]
    expected = [(buckets + depth - 1) * bucket / (rate / 2) for depth in depths]
    assert on_one_link(cost, rate, instances).update() == pytest.approx(expected, EXACT)


@given(st.integers(1, 30), SIZES, RATES, RATES, SECONDS, st.sampled_from(["star", "chain", "tree"]))
def test_only_the_way_from_the_host_is_exposed_if_staged(
    instances: int, size: float, rate: float, h2d: float, fixed_s: float, plan: Any
) -> None:
    ways: dict[str, Any] = {"bytes": size, "plan": plan, "convert_s": 3.0}
    sent = max(on_one_link(TransferCost(0.0, **ways), rate, instances).update())
    fleet = on_one_link(
        TransferCost(fixed_s, staged=True, h2d_bytes_per_s=h2d, **ways), rate, instances
    )
    ends = fleet.update()
    assert fleet.published_at == pytest.approx(sent, EXACT)
    assert ends == pytest.approx([sent + fixed_s + size / h2d] * instances, EXACT)


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=20), SIZES, RATES)
def test_a_shared_link_is_never_idle_and_never_faster_than_its_rate(
    times: list[float], size: float, rate: float
) -> None:
    """The last transfer of a busy period ends as if all had been sent one after the other."""
    ends = on_one_link(TransferCost(0.0, size), rate, len(times)).update(times)
    free_at = 0.0
    for at in sorted(times):
        free_at = max(free_at, at) + size / rate
    assert max(ends) == pytest.approx(free_at, EXACT)
    for at, end in zip(times, ends, strict=True):
        assert end - at >= size / rate * (1 - EXACT)


def test_each_link_has_its_own_plan_and_the_others_a_path_each() -> None:
    links = NetworkLink("a", 10.0, instances=(0, 1)), NetworkLink("b", 5.0, instances=(3,))
    fleet = Fleet(TransferCost(0.0, 100.0, 50.0), links, 5)
    assert fleet.update() == [20.0, 20.0, 2.0, 20.0, 2.0]
    assert fleet.weights.sent_bytes == {"a": 200.0, "b": 100.0}


@pytest.mark.parametrize(
    ("plan", "staged", "exposed_s"),
    [("star", False, 84.0), ("chain", False, 3.9), ("tree", False, 5.6), ("star", True, 0.7)],
)
def test_the_shipped_example_says_what_a_plan_is_worth(
    plan: Any, staged: bool, exposed_s: float
) -> None:
    scenario = load_scenario("qwen32b-96xh100-one-link")
    cost = msgspec.structs.replace(scenario.weights, plan=plan, staged=staged)
    fleet = Fleet(cost, scenario.network, scenario.fleet.instances)
    assert scenario.fleet.instances == 32
    assert round(max(fleet.update()) - fleet.published_at, 1) == pytest.approx(exposed_s, abs=0.06)


def with_one_link(weights: TransferCost) -> Scenario:
    network = (NetworkLink("nic", 25.0),)
    scenario = make_scenario(instances=2, prompts_per_step=2, train_s=4.0)
    return msgspec.structs.replace(scenario, weights=weights, network=network)


def test_a_run_waits_for_the_link() -> None:
    trace = make_trace({f"g{n}": [5, 6] for n in range(4)})
    cost = TransferCost(1.0, 100.0, convert_s=2.0)
    ran = watch(make_policy("sync"), trace, with_one_link(cost))
    ((at, _),) = ran.said(WeightsPublished)
    assert [end for end, _ in ran.said(WeightsUpdated)] == [at + 2.0 + 8.0 + 1.0] * 2
    run = run_policy(make_policy("sync"), trace, with_one_link(cost))
    assert run.weights == WeightFigures(11.0, 11.0 / 2, {"nic": 200.0})
    assert run_policy(make_policy("sync"), trace, make_scenario(update_s=0.0)).weights is None


def test_staged_weights_are_published_when_all_hosts_have_them() -> None:
    trace = make_trace({f"g{n}": [5, 6] for n in range(4)})
    cost = TransferCost(1.0, 100.0, convert_s=2.0)
    plain = watch(make_policy("sync"), trace, with_one_link(cost))
    staged = msgspec.structs.replace(cost, staged=True, h2d_bytes_per_s=50.0)
    ran = watch(make_policy("sync"), trace, with_one_link(staged))
    ((plain_at, _),), ((at, _),) = plain.said(WeightsPublished), ran.said(WeightsPublished)
    assert at == plain_at + 2.0 + 8.0
    assert {now for now, _ in ran.said(UpdateWeights)} == {at}
    assert [end for end, _ in ran.said(WeightsUpdated)] == [at + 2.0 + 1.0] * 2


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ({"name": "a"}, "expected tables"),
        ([{"name": "a", "bytes_per_second": 1.0}], r"network\[0\].bytes_per_second"),
        ([{"name": "a", "bytes_per_s": 1.0, "instances": [2]}], "the fleet has 2"),
        ([{"name": "a", "bytes_per_s": 1.0, "instances": [1, 1]}], "on one link, once"),
        ([{"name": n, "bytes_per_s": 1.0} for n in "ab"], "on one link, once"),
        ([{"name": "a", "bytes_per_s": 1.0, "instances": [n]} for n in (0, 1)], "same name"),
        ([{"name": "a", "bytes_per_s": 1e-9}], "too low"),
    ],
)
def test_a_network_that_makes_no_sense_is_refused(network: Any, message: str) -> None:
    table = {
        "fleet": {"instances": 2, "kv_tokens": 1000},
        "cost": {"step_s": 1.0, "weights_s": 0.0, "token_s": 0.0},
        "weights": {"bytes": 1.0},
        "network": network,
    }
    with pytest.raises(ConfigError, match=message):
        parse_scenario("s", table)
