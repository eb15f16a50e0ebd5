"""One screen, whole at every width."""

from __future__ import annotations

import msgspec
import pytest
from rich.console import Console

from rollout_sched.top import Document, screen
from tests.top.made_up import document, instance, said

URL = "http://gateway:9000"


def shown(of: Document, width: int = 80, limit: int = 99, away: str = "") -> str:
    console = Console(width=width, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(screen(of, URL, limit, away))
    return capture.get()


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
