"""The documents: their programs run, in front of simulated servers; what they refer to exists."""

from __future__ import annotations

import ast
import asyncio
import re
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import pytest

import rollout_sched
from rollout_sched.cli import main
from rollout_sched.simulators.fake_instance.engine import EngineSettings
from rollout_sched.simulators.fake_instance.server import FakeServer
from rollout_sched.simulators.replay.scenario import load_scenario
from rollout_sched.simulators.tune import command as tune_command
from tests import doors
from tests.inspection.journals import recorded

ROOT = Path(rollout_sched.__file__).parents[1]
README, CLIENT = ROOT / "README.md", ROOT / "docs/client.md"
PROMISES = ROOT / "docs/promises.md"


def programs(document: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)


(IN_SHORT,) = programs(README)
WHOLE, IN_PARTS = (program for program in programs(CLIENT) if "asyncio.run(" in program)
PORTS = (8101, 8102)

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef

#: A test in a document: its file, and its name in it.
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::([\w:]+))?`")


@contextmanager
def servers() -> Iterator[list[int]]:
    """The ports of two, which run in a thread of their own until the end."""
    spec = load_scenario("qwen7b-8xh100").instance
    ports: list[int] = []
    up, stop = threading.Event(), asyncio.Event()
    loop: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loop.append(asyncio.get_running_loop())
        running = [FakeServer(EngineSettings(spec, speed=100.0)) for _ in PORTS]
        try:
            for server in running:
                ports.append(await server.start("127.0.0.1", 0))
            up.set()
            await stop.wait()
        finally:
            for server in running:
                await server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert up.wait(20)
    try:
        yield ports
    finally:
        loop[0].call_soon_threadsafe(stop.set)
        thread.join(20)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[[str], list[str]]:
    """The lines that a program prints."""

    def lines(program: str) -> list[str]:
        with servers() as ports:
            for written, port in zip(PORTS, ports, strict=True):
                program = program.replace(f"127.0.0.1:{written}", f"127.0.0.1:{port}")
            exec(compile(program, str(CLIENT), "exec"), {"__name__": "__main__"})
        return capsys.readouterr().out.splitlines()

    return lines


def test_the_loop_of_the_readme(tmp_path: Path) -> None:
    """It has no `async def` around it; what it does not define is the trainer's."""
    checkpoint = tmp_path / "1"
    checkpoint.mkdir()
    (checkpoint / "weights.pt").touch()
    trained: list[rollout_sched.Batch] = []
    prompts = [rollout_sched.Prompt(f"p{number}", [1, 2], 2, 64) for number in range(3)]
    program = IN_SHORT.replace("/ckpt", str(tmp_path))
    code = compile(program, str(README), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with servers() as ports:
        instances = [f"http://127.0.0.1:{port}" for port in ports]
        given = {"instances": instances, "prompts": prompts, "train": trained.append}
        asyncio.run(eval(code, given))
    assert [sorted(batch.groups()) for batch in trained] == [["p0", "p1", "p2"]]


def test_the_training_loop(run: Callable[[str], list[str]]) -> None:
    said = sorted(line.split()[1] for line in run(WHOLE))
    assert said == [f"prompt-{number}" for number in range(6)]


def test_a_loop_that_accumulates_gradients(run: Callable[[str], list[str]]) -> None:
    said = run(IN_PARTS)
    steps = [line for line in said if line.startswith("step")]
    assert steps == ["step 0 1.0", "step 1 1.0"], "the stand-in's gradient is 1 for each token"
    assert said[-1] == steps[-1]
    prompts = sorted(line.split()[2] for line in said if line not in steps)
    assert prompts == [f"prompt-{number}" for number in range(8)]


def test_the_commands_for_a_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the document shows, in its order, on the journal of a small run."""
    text = (ROOT / "docs/journal.md").read_text()
    commands = re.findall(r"^rollout-sched (.*)$", text, re.MULTILINE)
    assert len(commands) > 6
    monkeypatch.chdir(tmp_path)
    # A hundred looks at the clock, whatever the machine.
    monkeypatch.setattr(tune_command, "BUDGET_S", 100.0 * 3600)
    hourly = partial(tune_command.tune, clock=count(0.0, 3600.0).__next__)
    monkeypatch.setattr(tune_command, "tune", hourly)
    recorded(Path("run.journal"), "one_step_off", "lrm_token_economy")
    for command in commands:
        assert main(shlex.split(command)) == 0, command
    assert {"best.toml", "run.html", "run.jsonl", "run.toml"} < {
        path.name for path in tmp_path.iterdir()
    }


def documents() -> dict[Path, str]:
    """The text of all documents, READMEs of rooms included."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    return {ROOT / name: (ROOT / name).read_text("utf-8") for name in listed.stdout.split()}


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    words = (re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", word).replace(" ", "-") for word in words}


def test_the_page_of_policies_has_each_preset_in_its_family_with_its_staleness(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["policy", "list"]) == 0
    listed = re.split(r"^(?=\S)", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    preset = re.compile(r"^  (\w+) +staleness (<= \d+|0|no bound) ", re.MULTILINE)
    row = re.compile(r"^\| `(\w+)` \| (.*?) \| .+ \|$", re.MULTILINE)
    text = (ROOT / "docs/policies.md").read_text()
    page = re.split(r"^## ", text, flags=re.MULTILINE)[1:]

    def families(parts: list[str], policy: re.Pattern[str]) -> list[list[tuple[str, str]]]:
        return sorted(sorted(policy.findall(part)) for part in parts)

    assert families(page, row) == families(listed, preset)


def test_each_link_leads_to_a_file_and_to_a_heading_in_it():
    """The links of all documents within the repository."""
    broken = []
    for document, text in documents().items():
        for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
            target = document.parent / link if link else document
            if "://" not in link and not (
                target.exists() and (not anchor or anchor in anchors(target.read_text("utf-8")))
            ):
                broken.append((document.name, link, anchor))
    assert broken == []


def names_of_tests(path: Path) -> set[str]:
    """As pytest writes them, after the file's; a state machine's is that of its class."""
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name, body=body):
                methods = [one.name for one in body if isinstance(one, FUNCTIONS)]
                found |= {name, *(f"{name}::{method}" for method in methods)}
            case ast.Assign(targets=[ast.Name(id=name)]):
                found.add(name)
    return {name for name in found if name.lower().startswith("test")}


def test_each_test_that_a_document_names_is_there():
    gone = []
    for document, text in documents().items():
        for path, name in TEST.findall(text):
            if not (ROOT / path).exists() or (name and name not in names_of_tests(ROOT / path)):
                gone.append((document.name, path, name))
    assert gone == []


def test_each_promise_names_its_page_and_a_test_that_holds_it():
    rows = re.findall(r"^\| (?!promise |-)(.+?) \| (.+?) \| .*\|$", PROMISES.read_text(), re.M)
    assert len(rows) > 50
    unheld = [said for said, held in rows if "](" not in said or not TEST.search(held)]
    assert unheld == []


def test_modules_that_docstrings_name_are_there():
    """Such as `core.restart.facts`, or a name at a door: `live.LiveScheduler`."""
    known = {module.removeprefix("rollout_sched.") for module in doors.modules()}
    gone = []
    for module, path in doors.modules().items():
        for name in re.findall(r"`((?:core|live|link)\.[a-z_A-Z.]+)`", path.read_text("utf-8")):
            house, _, first = name.partition(".")
            first = first.partition(".")[0]
            if f"{house}.{first}" not in known and first not in doors.door(
                f"rollout_sched.{house}"
            ):
                gone.append((module, name))
    assert gone == []
