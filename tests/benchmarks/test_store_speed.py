"""The store's peers are measured by another interpreter, which may lack them."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.store_speed import _asked


def interpreter(folder: Path, body: str) -> argparse.Namespace:
    """Options that name a program which does this in the peers' place."""
    program = folder / "python"
    program.write_text(f"#!{sys.executable}\n{body}\n")
    program.chmod(0o755)
    return argparse.Namespace(peers=str(program), batches=2)


def test_the_rate_is_the_last_word_it_prints(tmp_path: Path) -> None:
    assert _asked(interpreter(tmp_path, "print('started'); print('1234')"), "zeromq") == 1234.0


def test_a_peer_that_is_not_installed_has_no_rate(tmp_path: Path) -> None:
    assert _asked(interpreter(tmp_path, "import no_such_peer"), "zeromq") is None


def test_a_peer_that_fails_is_not_called_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        _asked(interpreter(tmp_path, "raise OSError('no room')"), "zeromq")
    assert "no room" in capsys.readouterr().err
