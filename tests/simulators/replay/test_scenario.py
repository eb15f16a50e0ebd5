"""Scenarios: what a file may say, and what a mistake in one is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollout_sched.config import ConfigError
from rollout_sched.core.errors import CallerError
from rollout_sched.simulators import traces
from rollout_sched.simulators.replay.faults import Failing, Lost
from rollout_sched.simulators.replay.links import TransferCost
from rollout_sched.simulators.replay.scenario import (
    Conversation,
    Traffic,
    TrafficModel,
    TrainerModel,
    load_scenario,
    parse_scenario,
)
from rollout_sched.simulators.traces.model import SampleRecord, Trace, Turn, gather
from tests.helpers import make_trace


def table(**changes: Any) -> dict[str, Any]:
    """A valid scenario with dotted keys set: table(fleet__instances=3)."""
    tables: dict[str, Any] = {
        "fleet": {"instances": 2, "kv_tokens": 1000},
        "cost": {"step_s": 1e-3, "weights_s": 1e-3, "token_s": 1e-6},
    }
    for key, value in changes.items():
        room, _, name = key.partition("__")
        if name:
            tables.setdefault(room, {})[name] = value
        else:
            tables[room] = value
    return tables


def drafts(**changes: Any) -> dict[str, Any]:
    return {"speculation": {"tokens": 4, "acceptance": 0.5, **changes}}


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_scenario("mine", table(**changes))
    return str(caught.value)


def test_fleet_and_cost_are_enough() -> None:
    scenario = parse_scenario("mine", table())
    assert scenario.name == "mine"
    assert (scenario.fleet.block_size, scenario.fleet.max_num_seqs) == (16, 256)
    assert (scenario.visibility.poll_s, scenario.visibility.stream_s) == (1.0, 0.0)
    assert not scenario.trainer.colocated
    assert scenario.job.prompts_per_step == 0


def test_an_instance_is_made_from_whole_blocks() -> None:
    scenario = parse_scenario("mine", table(fleet__kv_tokens=1000, fleet__block_size=32))
    assert scenario.instance.kv_blocks == 31
    drafting = parse_scenario("mine", table(**drafts(kv_share=0.25, schedule=[[1, 9, 4]])))
    assert drafting.instance.kv_blocks == 750 // 16
    assert drafting.instance.speculation == drafting.speculation


@pytest.mark.parametrize(
    ("changes", "path", "nearest"),
    [
        ({"flet": {}}, "flet", "fleet"),
        ({"fleet__instance": 3}, "fleet.instance", "instances"),
        ({"cost__steps_s": 3}, "cost.steps_s", "step_s"),
        ({"trainer__placment": "colocated"}, "trainer.placment", "placement"),
        ({"visibility__poll": 1}, "visibility.poll", "poll_s"),
        ({"speculation__token": 4}, "speculation.token", "tokens"),
        ({"job__prompt_per_step": 1}, "job.prompt_per_step", "prompts_per_step"),
        ({"traffic__patience": 3}, "traffic.patience", "patience_s"),
        ({"faults": [{"what": "lost", "instance": 0, "at": 3}]}, "faults[0].at", "at_s"),
    ],
)
def test_a_misspelt_key_gets_a_suggestion(changes: dict[str, Any], path: str, nearest: str) -> None:
    text = refusal(**changes)
    assert text.startswith(f"mine: {path}: unknown key")
    assert f'did you mean "{nearest}"?' in text


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"fleet": 3}, "fleet"),
        ({"fleet__instances": 0}, "fleet.instances"),
        ({"fleet__instances": "two"}, "fleet.instances"),
        ({"fleet__kv_tokens": 15}, "fleet.kv_tokens"),
        ({"trainer__placement": "elsewhere"}, "trainer.placement"),
        ({"trainer__fixed_s": -1.0}, "trainer.fixed_s"),
        ({"trainer__fixed_s": float("inf")}, "trainer.fixed_s"),
        ({"visibility__poll_s": float("nan")}, "visibility.poll_s"),
        ({"weights__bytes_per_s": 0}, "weights.bytes_per_s"),
        ({"cost__step_s": -1e-3}, "step_s must be from 0 to 60"),
        ({"cost__exponent": 0.5}, "exponent must be >= 1"),
        ({"fleet__max_num_batched_tokens": 100}, "max_num_batched_tokens (100) must be"),
        ({"job__max_tokens": 1.5}, "job.max_tokens"),
        ({"speculation": {"tokens": 4}}, "`acceptance`: at `speculation`"),
        (drafts(acceptance=1.5), "`speculation.acceptance`"),
        (drafts(tokens=0), "`speculation.tokens`"),
        (drafts(draft_share=float("inf")), "speculation.draft_share"),
        (drafts(method="eagle3"), "expected one of draft_model, eagle"),
        (drafts(schedule="sometimes"), 'expected "always", "auto", or rows'),
        (drafts(schedule=[]), 'expected "always", "auto", or rows'),
        (drafts(schedule=[[2, 3, 1]]), "[2, 3, 1]: begin the first row at 1"),
        (drafts(schedule=[[1, 3, 2], [3, 4, 1]]), "[3, 4, 1]: begin"),
        (drafts(schedule=[[1, 3, 5]]), "give 0 to 4 drafts, or increase tokens"),
        (drafts(kv_share=0.99), "increase it or lower speculation.kv_share"),
        ({"job__batches": False}, "job.batches is false and there is no [traffic]"),
        ({"traffic": 3}, "traffic: expected a table"),
        ({"traffic__rate": 2.0}, "traffic.for_s: missing"),
        ({"traffic__rate": -2.0}, "traffic.rate"),
        ({"faults": {"what": "lost"}}, "faults: expected tables, as in [[faults]]"),
        ({"faults": [{"at_s": 3}]}, "faults[0].what: expected one of lost, leaving"),
        ({"faults": [{"what": "last", "at_s": 3}]}, "not 'last'; did you mean \"lost\"?"),
        (
            {"faults": [{"what": ["lost"], "at_s": 3}]},
            "faults[0].what: expected one of lost, leaving",
        ),
        ({"faults": [{"what": "lost", "instance": 2, "at_s": 3}]}, "has 2, numbered from 0"),
        ({"faults": [{"what": "lost", "instance": 0, "at_s": -3}]}, "faults[0].at_s"),
        ({"faults": [{"what": "lost", "at_s": 3}]}, "`instance`"),
        ({"faults": [{"what": "failing", "at_s": 0, "share": 1.5}]}, "faults[0].share"),
        (
            {"faults": [{"what": "failing", "at_s": 0, "blame": "instance"}]},
            "faults[0]: no instance can ever be reached again",
        ),
        (
            {"faults": [{"what": "joins", "at_s": 9, "instance": n} for n in (0, 1)]},
            "every instance joins later",
        ),
    ],
)
def test_a_wrong_value_is_reported_with_its_place(changes: dict[str, Any], path: str) -> None:
    text = refusal(**changes)
    assert text.startswith("mine: ")
    assert path in text


@pytest.mark.parametrize("missing", ["fleet", "cost"])
def test_a_missing_table(missing: str) -> None:
    tables = table()
    del tables[missing]
    with pytest.raises(ConfigError, match=f"mine: .*`{missing}`"):
        parse_scenario("mine", tables)


def test_missing_file_names_the_nearest_scenario() -> None:
    with pytest.raises(ConfigError, match=r'neither.*scenario; did you mean "qwen7b-8xh100"'):
        load_scenario("qwen7b-8h100")


def test_bad_toml_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text("[fleet")
    with pytest.raises(ConfigError, match=r"broken\.toml: not valid TOML"):
        load_scenario(str(path))


def test_traffic_and_faults() -> None:
    faults = [
        {"what": "lost", "instance": 1, "at_s": 9, "returns_after_s": 5.0},
        {"what": "failing", "at_s": 3.0, "blame": "instance", "instance": 0},
    ]
    scenario = parse_scenario("mine", table(traffic__rate=2.0, traffic__for_s=9.0, faults=faults))
    assert scenario.traffic == TrafficModel(rate=2.0, for_s=9.0)
    assert scenario.faults == (
        Lost(at_s=9.0, instance=1, returns_after_s=5.0),
        Failing(at_s=3.0, blame="instance", instance=0),
    )
    assert parse_scenario("mine", table()).traffic is None


def test_another_job_keeps_values_that_are_not_given() -> None:
    scenario = load_scenario("tiny-cpu-2").with_job({"prompts_per_step": 7, "epochs": 2})
    other = scenario.with_job({"prompts_per_step": 0, "max_tokens": 9, "policy": "no job's"})
    assert (other.job.prompts_per_step, other.job.epochs, other.job.max_tokens) == (7, 2, 9)
    assert other.fleet == scenario.fleet


def test_a_step_costs_a_fixed_part_and_a_part_per_token() -> None:
    trainer = TrainerModel(fixed_s=5.0, seconds_per_token=1e-3)
    assert trainer.step_s(0) == 5.0
    assert trainer.step_s(2000) == pytest.approx(7.0)
    assert trainer.step_s(2000, last=False) == pytest.approx(2.0)


@pytest.mark.parametrize(("placement", "shared"), [("colocated", True), ("disaggregated", False)])
def test_placement(placement: Any, shared: bool) -> None:
    assert TrainerModel(placement=placement).colocated is shared


def test_a_transfer_takes_its_bytes_over_the_bandwidth() -> None:
    assert TransferCost(1.0, 15.2e9, 10e9).seconds == pytest.approx(2.52)
    assert TransferCost(0.5).seconds == 0.5


@pytest.mark.parametrize(
    "values",
    [
        {"fixed_s": -1.0},
        {"bytes": -1.0},
        {"bytes_per_s": 0.0},
        {"speed": 1.0},
        {"plan": "ring"},
        {"bucket_bytes": 0.0},
        {"bytes": 1e30},
        {"bytes": 1e9, "h2d_bytes_per_s": 1e-9},
    ],
)
def test_nonsensical_values_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(values, TransferCost)


TALK = SampleRecord("g", 0, 4, (Turn(3, 10, 2.5), Turn(2)), finish="length", arrival_s=7.0)


class TestConversation:
    def test_goes_from_turn_to_turn(self) -> None:
        client = Conversation("session-3", 7.0, TALK, 5)
        assert (client.session, client.group, client.context_tokens) == ("session-3", "client/g", 5)
        assert (client.present.turns, client.present.finish) == ((Turn(3),), "stop")
        assert client.answered(3) == 2.5
        assert (client.group, client.context_tokens) == ("session-3/1", 5 + 3 + 10)
        assert client.known_tokens == 8
        assert (client.present.turns, client.present.finish) == ((Turn(2),), "length")
        assert client.answered(2) is None

    def test_one_question_needs_no_session(self) -> None:
        assert Conversation("session-0", 0.0, SampleRecord("g", 0, 4, (Turn(3),)), 4).session == ""


class TestDrawn:
    trace = make_trace({f"g{i}": [3 + i, 5 + i] for i in range(20)})

    def arrivals(self, run_seed: int = 0, seed: int = 0) -> list[tuple[float, SampleRecord]]:
        model = TrafficModel(rate=2.0, for_s=500.0, seed=seed)
        drawn = Traffic(model, self.trace, run_seed)
        return [(c.arrival_s, c.sample) for c in drawn.conversations()]

    def test_drawn_traffic_has_rate_duration_and_any_samples(self) -> None:
        arrivals = self.arrivals()
        assert 900 < len(arrivals) < 1100
        times = [at for at, _ in arrivals]
        assert times == sorted(times)
        assert times[0] > 0
        assert 490 < times[-1] < 500
        assert len({(s.group, s.sample) for _, s in arrivals}) == 40

    def test_by_seed(self) -> None:
        assert self.arrivals() == self.arrivals()
        assert self.arrivals(1) != self.arrivals() != self.arrivals(seed=1)

    def test_another_trace_may_be_named(self, tmp_path: Path) -> None:
        path = tmp_path / "talk.jsonl"
        traces.write(Trace("talk", gather([TALK])), path)
        drawn = Traffic(TrafficModel(rate=1.0, for_s=9.0, trace=str(path)), self.trace, 0)
        assert {c.sample.group for c in drawn.conversations()} == {"g"}


class TestRecorded:
    def test_each_sample_once_when_it_arrived(self) -> None:
        early = SampleRecord("e", 0, 4, (Turn(3),), arrival_s=1.5)
        traffic = Traffic(TrafficModel(), Trace("t", gather([TALK, early])), 0)
        assert [(c.arrival_s, c.name) for c in traffic.conversations()] == [
            (1.5, "session-0"),
            (7.0, "session-1"),
        ]
        assert len(traffic) == 2
        assert len(Traffic(TrafficModel(for_s=7.0), Trace("t", gather([TALK, early])), 0)) == 1

    def test_a_trace_without_arrivals_is_refused_with_a_remedy(self) -> None:
        with pytest.raises(CallerError, match=r"trace t has no arrival times.*set traffic\.rate"):
            Traffic(TrafficModel(), make_trace({"a": [3]}), 0)


class TestNeeds:
    def test_the_longest_possible_request_is_known(self) -> None:
        trace = Trace("t", gather([TALK]))
        assert Traffic(TrafficModel(max_tokens=50), trace, 0).most_tokens == 4 + 3 + 10 + 50
        assert Traffic(TrafficModel(max_tokens=2), trace, 0).most_tokens == 4 + 2 + 10 + 2
        assert Traffic(TrafficModel(), trace, 0).max_tokens == 5, "the trace's cap"

    def test_lengths_by_prompt(self) -> None:
        other = SampleRecord("g", 1, 4, (Turn(8),), arrival_s=1.0)
        traffic = Traffic(TrafficModel(), Trace("t", gather([TALK, other])), 0)
        assert traffic.length("client/g") == round((3 + 8) / 2)
        assert traffic.length("session-1/1") == 2
