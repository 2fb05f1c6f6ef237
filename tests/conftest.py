"""The fixture `suite`, and the longest tests first: two workers then end together."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]

# Minutes of interpreter or compiler each, in the order of their length.
LONG = (
    "test_kills.py::test_fifty_kills_of_the_sweep_then_resume",
    "test_suite_against_the_reference[every_layout",
    "test_suite_against_the_reference[not every_layout",
    "test_prepare.py::test_fused_suite_against_the_reference",
    "test_fused_quantize.py::test_suite_against_the_reference",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """xdist's worksteal hands each of two workers one half: a long test starts each half."""
    found = [[item for item in items if name in item.nodeid] for name in LONG]
    long = [item for several in found for item in several]
    rest = [item for item in items if item not in long]
    middle = (len(rest) + 1) // 2
    items[:] = [*long[::2], *rest[:middle], *long[1::2], *rest[middle:]]


@pytest.fixture
def suite() -> Callable[..., None]:
    """Run a file of tests/interpreted in a process of its own: triton decides at import whether it
    interprets. On a GPU the kernels run as compiled, elsewhere under the interpreter."""

    def run(name: str, least: int, which: str = "") -> None:
        """least: how many tests must have passed, so that none went missing."""
        environment = dict(os.environ)
        if not torch.cuda.is_available():
            environment["TRITON_INTERPRET"] = "1"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-n", "0", "-k", which, f"tests/interpreted/{name}"],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        passed = re.search(r"(\d+) passed", done.stdout)
        assert passed and int(passed[1]) >= least, done.stdout[-500:]

    return run
