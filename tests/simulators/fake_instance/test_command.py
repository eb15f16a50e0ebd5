"""`rollout-sched fake-instance`, as a process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

from rollout_sched.cli import main


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_the_command_reports_readiness_and_ends_at_once(host: str, shown: str) -> None:
    program = "import sys; from rollout_sched.cli import main; sys.exit(main())"
    arguments = ["fake-instance", "--port", "0", "--model", "m", "--scenario", "tiny-cpu-2"]
    arguments += ["--host", host]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        assert line.startswith(f"m ready on http://{shown}:")
        url = line.split()[-1]
        with urllib.request.urlopen(f"{url}/v1/models", timeout=20) as response:
            assert json.load(response)["data"][0]["id"] == "m"
        body = json.dumps({"token_ids": [1], "sampling_params": {"ignore_eos": True}}).encode()
        request = urllib.request.Request(
            f"{url}/inference/v1/generate", body, {"Content-Type": "application/json"}
        )
        failures: list[Exception] = []

        def ask() -> None:
            try:
                urllib.request.urlopen(request, timeout=60).read()
            except Exception as error:
                failures.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with urllib.request.urlopen(f"{url}/load", timeout=20) as response:
                if json.load(response)["server_load"]:
                    break
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        asking.join(20)
        assert len(failures) == 1
        assert process.stdout.read() == ""
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fault", "quake"], "--fault: 'quake'"),
        (["--scenario", "nowhere"], "nowhere"),
        (["--max-num-seqs", "-1"], "max_num_seqs must be >= 1, got -1"),
        (["--vocab-size", "7"], "a vocabulary needs at least 64 ids"),
    ],
)
def test_bad_options(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fake-instance", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--speed", "--stream-interval", "--tensor-parallel-size"])
def test_no_zero(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fake-instance", flag, "0"])
    assert f"argument {flag}: '0': Expected" in capsys.readouterr().err
