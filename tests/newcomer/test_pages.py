"""The page of each trainer: the same five headings, and its gateway says what the page shows.

What needs the trainer's library runs in tests/neighbours, by the test that the page names.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

import rollout_sched
from rollout_sched.cli import parse
from tests.neighbours.fleet import Program, fake_instance, program

DOCS = Path(rollout_sched.__file__).parents[1] / "docs"
if not DOCS.exists():
    pytest.skip("the tree is not here", allow_module_level=True)

TRAINERS = ["verl", "trl", "skyrl", "prime_rl", "areal", "slime"]
LOOP = "client"
HEADINGS = [
    "Versions",
    "Start vLLM",
    "Start the gateway",
    "Change these lines",
    "What you should see",
]
URL = re.compile(r"http://(?:gpu-\d:8000|127\.0\.0\.1:810\d)")


def sections(page: str) -> dict[str, str]:
    """The text under each heading of the second level, in their order."""
    text = re.sub(r"\A.*?^## ", "", (DOCS / f"{page}.md").read_text(), flags=re.M | re.S)
    return dict(part.split("\n", 1) for part in re.split(r"^## ", text, flags=re.M))


def blocks(text: str, language: str = "") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def shows(text: str) -> re.Pattern[str]:
    """What is shown, in its order; `...` stands for anything in a line."""
    lines = [re.escape(line).replace(r"\.\.\.", ".*") for line in text.splitlines()]
    return re.compile(r"\n(?:.*\n)*?".join(lines))


@pytest.fixture(scope="module", params=[*TRAINERS, LOOP])
def page(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def gateway(page: str) -> Iterator[tuple[Program, dict[str, str]]]:
    """The page's own, in front of simulated servers, and what stands for its URLs."""
    (command,) = blocks(sections(page)["Start the gateway"])
    dialect = ["--dialect", "sglang"] if page == "slime" else []
    with ExitStack() as stack:
        servers = {
            url: stack.enter_context(fake_instance("--speed", "50", *dialect)).url
            for url in URL.findall(command)
        }
        command = URL.sub(lambda found: servers[found[0]], command)
        words = shlex.split(command.replace("--port 9000", "--port 0"))[1:]
        running = stack.enter_context(program([*words, "--drain-s", "0"], "listening on "))
        yield running, {"http://127.0.0.1:9000": running.url, **servers}


def test_five_headings_come_first(page: str) -> None:
    assert list(sections(page))[:5] == HEADINGS


def test_what_it_shows_of_ours_is_python_yaml_or_a_command(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text()
    for source in blocks(text, "python"):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module == "rollout_sched":
                assert {name.name for name in node.names} <= set(rollout_sched.__all__)
    for source in blocks(text, "yaml"):
        assert yaml.safe_load(source)
    for command in re.findall(r"^(?:`|Without a GPU, `)?rollout-sched ([^`\n]*)", text, re.M):
        assert parse(shlex.split(command.rstrip("\\"))).run


def test_the_gateway_says_what_the_page_shows(
    page: str, gateway: tuple[Program, dict[str, str]]
) -> None:
    if page == LOOP:
        return  # it shows what its loop prints
    running, written = gateway
    (wanted,) = blocks(sections(page)["What you should see"])
    for shown, real in written.items():
        wanted = wanted.replace(shown, real)
    said = running.log.read_text()
    assert shows(wanted).search(said), said


def test_its_state_has_what_the_page_names(
    page: str, gateway: tuple[Program, dict[str, str]]
) -> None:
    said = re.findall(r"`curl \S+/admin/state`:(.*?)\.", sections(page)[HEADINGS[-1]], re.S)
    named = {key for text in said for key in re.findall(r"`(\w+)`", text)}
    assert named or page in (LOOP, "slime")
    assert named <= set(gateway[0].get("/admin/state"))


def test_the_loop_prints_what_its_page_shows(tmp_path: Path) -> None:
    (source,) = blocks(sections(LOOP)["Change these lines"], "python")
    with fake_instance("--speed", "50") as one, fake_instance("--speed", "50") as two:
        for url, server in zip(sorted(set(URL.findall(source))), (one, two), strict=True):
            source = source.replace(url, server.url)
        done = subprocess.run(
            [sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, check=True
        )
    (wanted,) = blocks(sections(LOOP)["What you should see"])
    lines = done.stdout.splitlines()
    assert len(lines) == 6
    assert all(shows(wanted.strip()).fullmatch(line) for line in lines), lines
