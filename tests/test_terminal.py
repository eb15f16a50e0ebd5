"""Whatever others have written, a terminal only shows it."""

from __future__ import annotations

import ast
import io
import json
import sys
from pathlib import Path

import pytest
from rich.text import Text

import rollout_sched
from rollout_sched import terminal
from rollout_sched.cli import main
from tests.top.made_up import instance, said
from tests.top.served import serving

ROOT = Path(rollout_sched.__file__).parent

#: Sets the title, clears the screen, goes back over the line, reverses the rest of it.
HOSTILE = "a\x1b]0;owned\x07\x1b[2J\x9b2J\r\x08\x7f\u202eb\u2028c"


def only_shows(text: str) -> bool:
    return text == terminal.plain(text)


@pytest.mark.parametrize("text", ["", "a\tb\nc", "½ 字 👍🏽 é", "\\u001b"])
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert terminal.plain(text) == text


def test_escapes_are_those_of_json() -> None:
    assert json.loads(f'"{terminal.plain(HOSTILE)}"') == HOSTILE
    assert terminal.plain("\ud800").encode() == rb"\ud800"


def test_what_is_printed_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    streams = sys.stdout, sys.stderr
    with terminal.plain_output():
        print(HOSTILE)
        print(HOSTILE, file=sys.stderr)
        sys.stdout.writelines([HOSTILE])
        terminal.console().print(Text(HOSTILE), HOSTILE)
        sys.stdout.flush()
    assert (sys.stdout, sys.stderr) == streams
    out, err = capsys.readouterr()
    assert only_shows(out)
    assert only_shows(err)
    assert out.count("owned") == 4


def test_a_console_keeps_its_own_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Tty())
    with terminal.plain_output():
        console = terminal.console(width=400)
        console.print(Text(HOSTILE, "bold"))
    out = sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert out.startswith("\x1b[1m")
    assert out.count("\x1b") == 2, "on and off again"


def test_commands_print_only_what_is_plain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, reasons, descriptions and what cannot be read, from others' files and gateways."""
    quoted = json.dumps(HOSTILE).replace("\\u007f", "\\u007F")
    policy, trace = tmp_path / "p.toml", tmp_path / "t.jsonl"
    policy.write_text(f"about = {quoted}\nsource = {quoted}\n[routing]\nuse = {quoted}\n")
    trace.write_text(f'{{"id":{quoted},"t":{quoted}}}\n')
    with serving() as gateway:
        hostile = said(instances=[instance(1, url=HOSTILE, reason=HOSTILE, status=HOSTILE)])
        hostile |= {"policy": HOSTILE, "broken": HOSTILE, "groups": {HOSTILE: 1}}
        hostile["changes"] = [{"at": 1.0, "level": "info", "text": HOSTILE}]
        gateway.body = json.dumps(hostile).encode()
        for words in (
            ["policy", "check", str(policy)],
            ["trace", "stats", str(trace)],
            ["replay", str(trace), "--policy", str(policy)],
            ["journal", "summary", str(trace)],
            ["top", gateway.url, "--once"],
        ):
            status = main(words)
            out, err = capsys.readouterr()
            assert only_shows(out + err), words
            assert out + err
            assert (status == 0) == (words[0] == "top"), words
    assert "owned" in out


def test_no_other_module_writes_to_the_terminal() -> None:
    """Only consoles of `terminal`, and standard streams that it has replaced."""
    rooms = [ROOT, *(ROOT / linked for linked in ("integrations", "simulators", "policies"))]
    for path in (path for room in rooms for path in room.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            name = getattr(called, "id", getattr(called, "attr", ""))
            assert name != "Console" or path.name == "terminal.py", path
            assert getattr(node, "attr", "") not in ("__stdout__", "__stderr__"), path
