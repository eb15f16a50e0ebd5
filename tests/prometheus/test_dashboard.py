"""docs/grafana.json against a real Prometheus: its queries parse, name what is there, and answer.

Needs `prometheus` and `promtool` (Debian's package `prometheus`).
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.integrations.gateway.control_plane.test_prometheus import documented
from tests.prometheus.gateway_world import gateway_at_work

FILE = Path(__file__).resolve().parents[2] / "docs/grafana.json"
DASHBOARD = json.loads(FILE.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]

#: What Grafana puts in place of $__rate_interval at this scrape interval, at least.
SCRAPE_S, WINDOW_S = 1, 8

#: For all queries to answer, which takes two scrapes and a few steps.
PATIENCE_S = 60.0


def expression(target: dict[str, Any]) -> str:
    return str(target["expr"]).replace("$__rate_interval", f"{WINDOW_S}s")


def test_it_is_a_dashboard_of_grafana_s_model() -> None:
    """Grafana's own types read it, and know every key of it."""
    read = json.loads(json.dumps(Dashboard.from_json(DASHBOARD), cls=JSONEncoder))

    def is_kept(ours: Any, theirs: Any, where: str) -> None:
        if isinstance(ours, dict):
            for key, value in ours.items():
                assert key in theirs, f"{where}: no {key}"
                is_kept(value, theirs[key], f"{where}.{key}")
        elif isinstance(ours, list):
            for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                is_kept(one, other, f"{where}[{number}]")
        else:
            assert ours == theirs, where

    is_kept(DASHBOARD, read, "dashboard")


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (at["x"] + right, at["y"] + down) for right in range(at["w"]) for down in range(at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_metric_is_documented_and_so_exposed() -> None:
    known = documented()
    for title, target in QUERIES:
        named = set(re.findall(r"rollout_sched_\w+", target["expr"]))
        assert named or "process_" in target["expr"], title
        for name in named:
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            assert name in known or known[base][0] == "histogram", f"{title}: {name}"


def test_every_expression_parses(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expression(target)}
        for number, (_, target) in enumerate(QUERIES)
    ]
    file = tmp_path / "rules.json"  # JSON is YAML
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    checked = _ran("promtool", "check", "rules", str(file))
    assert f"{len(QUERIES)} rules found" in checked


def test_the_page_follows_prometheus_s_conventions(tmp_path: Path) -> None:
    with gateway_at_work(tmp_path) as url:
        page = urllib.request.urlopen(f"{url}/metrics").read().decode()
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_panel_is_answered(tmp_path: Path) -> None:
    with gateway_at_work(tmp_path) as url, _prometheus(url, tmp_path) as ask:
        unanswered = {f"{title} {target['refId']}": expression(target) for title, target in QUERIES}
        deadline = time.monotonic() + PATIENCE_S
        while unanswered and time.monotonic() < deadline:
            time.sleep(SCRAPE_S)
            unanswered = {name: query for name, query in unanswered.items() if not ask(query)}
        assert not unanswered
        for series in ask('{__name__=~"rollout_sched_.*"}'):
            taken = [label for label in series["metric"] if label.startswith("exported_")]
            assert not taken, "a label of Prometheus's own was used"


def _ran(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.fail(f"{command[0]} is missing: apt-get install prometheus")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def _prometheus(url: str, folder: Path) -> Iterator[Any]:
    """One that scrapes the gateway; yields what asks it a query."""
    scraped = {"job_name": "rollout", "static_configs": [{"targets": [url.rpartition("/")[2]]}]}
    file = folder / "prometheus.json"
    global_ = {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s"}
    file.write_text(json.dumps({"global": global_, "scrape_configs": [scraped]}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={file}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def ask(query: str) -> list[dict[str, Any]]:
        about = urllib.parse.urlencode({"query": query})
        try:
            with urllib.request.urlopen(f"http://{address}/api/v1/query?{about}") as answer:
                said = json.load(answer)
        except urllib.error.URLError as error:
            if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                raise
            return []  # it is not up yet
        # No sample is what a rate of nothing says, and what a quantile of nothing does: NaN.
        result: list[dict[str, Any]] = said["data"]["result"]
        return [series for series in result if series["value"][1] != "NaN"]

    try:
        yield ask
    finally:
        process.terminate()
        process.wait(30)
