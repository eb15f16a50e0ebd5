"""One screen, whole at every width."""

from __future__ import annotations

import msgspec
import pytest
from rich.console import Console

from rollout_sched.top import Document, Trend, screen
from tests.top.made_up import document, instance, said

URL = "http://gateway:9000"


def shown(
    of: Document, width: int = 80, limit: int = 99, away: str = "", trend: Trend | None = None
) -> str:
    console = Console(width=width, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(screen(of, URL, limit, away, trend))
    return capture.get()


def headline(*documents: Document) -> list[list[str]]:
    """The labels, the values and the lines of the figures."""
    lines = shown(documents[-1], 120, trend=Trend(documents)).splitlines()[2:5]
    return [line.split() for line in lines]


def at(now: float, made: int, busy_s: float, idle_s: float, complete: int = 0) -> Document:
    one = instance(1, generated_tokens=made)
    step = {"number": 1, "elapsed_s": 1.0, "finished": 0, "in_batch": 0, "complete": complete}
    spent = {"busy": busy_s, "idle": idle_s}
    return document(now=now, instances=[one], instance_s=spent, step=step)


def test_rates_are_of_the_last_ten_seconds() -> None:
    looks = [at(float(t), 100 * t + 900 * max(0, t - 20), 8.0 * t, 2.0 * t) for t in range(31)]
    _, values, lines = headline(*looks)
    assert values[:3] == ["1000", "20%", "512/512"]
    assert (lines[0][0], lines[0][-1]) == ("\u2582", "\u2588"), "it has grown"


def test_a_restarted_instance_counts_from_its_own_start() -> None:
    _, values, _ = headline(at(0.0, 5000, 1, 0), at(5.0, 5500, 6, 0), at(10.0, 700, 11, 0))
    assert values[0] == "120"


def test_a_restarted_gateway_begins_anew() -> None:
    trend = Trend([at(500.0, 0, 400, 100), at(3.0, 30, 2, 1)])
    assert [level.at for level in trend.levels] == [3.0]


def test_more_groups_than_a_batch_has_leave_none_open() -> None:
    assert headline(at(0.0, 0, 1, 1, complete=600))[1][2] == "0/512"


def test_a_step_seen_in_part_has_no_tail() -> None:
    last = said()["steps"][-1] | {"t50_s": None, "t90_s": None, "t99_s": None}
    (row,) = [x for x in shown(document(steps=[last])).splitlines() if x.strip().startswith("128 ")]
    assert row.split()[2:5] == ["-", "-", "-"]


@pytest.mark.parametrize("width", [80, 120])
def test_wide_figures_are_not_cut(width: int) -> None:
    text = shown(document(), width)
    lines = text.splitlines()
    assert "…" not in text
    assert max(map(len, lines)) <= width
    (row,) = [line for line in lines if line.startswith("10.0.0.1:8000")]
    assert row.split()[1:6] == ["serving", "128", "249/256", "50", "99%"]
    last = [line.split() for line in lines if line.split()[:2] == ["128", "1,234"]]
    assert last == [
        ["128", "1,234", "234.5", "678.9", "1,200", "123.4", "8192", "123M", "12", "88%"]
    ]
    assert "2,048 in flight, 12,345 waiting, 678 parked" in text
    assert "staleness: 0: 90%, 1: 9%, 4: 1%" in text
    assert "tokens wasted: surplus 1,234,567, deferred 12" in text


def test_the_step_and_what_it_waits_for() -> None:
    text = shown(document())
    assert "step 129: 789.0 s, 131/512 groups whole, 4,321 samples" in text
    assert "the trainer waits\nweights wait for http://10.0.0.3:8000 to join\n" in text


def test_instances_not_serving_come_first_with_a_reason() -> None:
    lines = shown(document(), limit=3).splitlines()
    starts = [line.split()[0] for line in lines if line.startswith("10.0.0.")]
    assert starts == ["10.0.0.2:8000", "10.0.0.3:8000", "10.0.0.1:8000", "10.0.0.3:8000:"]
    assert "10.0.0.3:8000: it does not answer" in lines
    assert "and 5 more, 5 serving" in lines


def test_the_newest_changes_come_last() -> None:
    lines = shown(document()).splitlines()
    assert lines[-1] == " 10 s ago: http://10.0.0.3:8000 was lost"
    assert lines[-2] == "82 min ago: change 8"


def test_a_gateway_without_a_trainer_or_an_instance() -> None:
    text = shown(document(instances=[], steps=[], staleness={}, waste={}, changes=[], groups={}))
    assert "no instances" in text
    assert "groups: none" in text
    assert "nothing was delivered" in text
    assert "tokens wasted: none" in text


def test_problems_are_at_the_top() -> None:
    of = document(broken="PolicyError: it chose nobody", healthy=False)
    lines = shown(of, away="connection refused").splitlines()
    assert "not healthy" in lines[0]
    assert "no answer: connection refused. Below is the last known state." in lines
    assert "the scheduler has stopped: PolicyError: it chose nobody" in lines


def test_markup_in_names_is_text() -> None:
    one = instance(1, url="http://[red]a[/red]:1", status="away", reason="[bold]it hangs[/]")
    text = shown(document(instances=[one]))
    assert "[red]a[/red]:1: [bold]it hangs[/]" in text


def test_unknown_fields_are_ignored() -> None:
    assert msgspec.convert(said(series=[1, 2]), Document).batches == 128


def test_another_schema_is_not_read() -> None:
    with pytest.raises(msgspec.ValidationError, match="schema"):
        msgspec.convert(said(schema="another/1"), Document)
