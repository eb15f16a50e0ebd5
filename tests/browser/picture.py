"""The picture in the README: `python -m tests.browser.picture docs/report_page.png`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.browser.conftest import chromium

REPLAY = ("lrm_token_economy", "--prompts-per-step", "24", "--steps", "8")
POLICIES = ("--policy", "round_robin_sync", "--policy", "best_async")


def main(out: Path) -> None:
    """The timelines of two policies on the same prompts."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "page.html"
        command = [sys.executable, "-m", "rollout_sched", "replay", *REPLAY, *POLICIES]
        subprocess.run([*command, "--html", str(path)], check=True, stdout=subprocess.DEVNULL)
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1300, "height": 700}, color_scheme="light")
        page.goto(path.as_uri())
        page.wait_for_timeout(1000)
        page.locator("#fleet .panels").screenshot(path=out)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
