"""What the documentation shows runs as it stands there, before simulated servers."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import rollout_sched
from rollout_sched.simulators.fake_instance.engine import EngineSettings
from rollout_sched.simulators.fake_instance.server import FakeServer
from rollout_sched.simulators.replay.scenario import load_scenario

DOCS = Path(rollout_sched.__file__).parents[1] / "docs"

#: Whole programs, not excerpts.
PROGRAMS = [
    block
    for block in re.findall(r"```python\n(.*?)```", (DOCS / "client.md").read_text(), re.DOTALL)
    if "asyncio.run(" in block
]


@contextmanager
def servers(count: int) -> Iterator[list[int]]:
    """Their ports; they run on an event loop of their own."""
    spec = load_scenario("qwen7b-8xh100").instance
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(scene: object) -> object:
        return asyncio.run_coroutine_threadsafe(scene, loop).result(10)  # type: ignore[arg-type]

    up = [FakeServer(EngineSettings(spec, speed=100.0)) for _ in range(count)]
    try:
        yield [run(server.start("127.0.0.1", 0)) for server in up]  # type: ignore[misc]
    finally:
        for server in up:
            run(server.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program[-60:].split("\n")[0])
def test_a_program_of_the_documentation(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    with servers(2) as ports:
        for written, port in zip((8101, 8102), ports, strict=True):
            assert f"127.0.0.1:{written}" in program
            program = program.replace(f"127.0.0.1:{written}", f"127.0.0.1:{port}")
        exec(compile(program, "docs/client.md", "exec"), {"__name__": "__main__"})
    prompts = {
        line.split("prompt-")[1].split()[0]
        for line in capsys.readouterr().out.splitlines()
        if "prompt-" in line
    }
    assert len(prompts) in (6, 8)


def test_both_programs_are_found() -> None:
    assert len(PROGRAMS) == 2
