"""Runs made once for all tests of reports, and a headless browser where there is one."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import made

from harness.report import write_report

RUNS: dict[str, Callable[[], tuple[list[made.Row], int]]] = {
    "mixed": lambda: (made.mixed(), 0),
    "hostile": lambda: (made.hostile(), 0),
    "many": lambda: (made.many(), 0),
    "empty": lambda: ([], 0),
    "interrupted": lambda: (made.mixed()[:40], 60),
    "unmeasured": lambda: (made.unmeasured(), 0),
}


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """name -> (run folder, its page), made on first use."""
    root, done = tmp_path_factory.mktemp("reports"), {}

    def make(name: str) -> tuple[Path, Path]:
        if name not in done:
            rows, planned = RUNS[name]()
            folder = made.write(root / name, rows, planned)
            page = write_report([folder], root / "out" / name, with_figures=False)
            done[name] = (folder, page)
        return done[name]

    return make


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Headless Chromium by its driver; the tests are skipped only where there is none."""
    found = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    binary, chromedriver = next(filter(None, found), None), shutil.which("chromedriver")
    if not binary or not chromedriver:
        pytest.skip("no Chromium and ChromeDriver here; Debian: chromium, chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--disable-dev-shm-usage", f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(chromedriver))
    driver.set_page_load_timeout(60)
    driver.set_script_timeout(60)
    yield driver
    driver.quit()
