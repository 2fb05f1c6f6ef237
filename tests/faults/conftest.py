"""The fixture `site`: where a test's sweeps run, with a check that no process stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_sweeps import Site

from harness.run import runs


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """`commit` and its like are asked once, since git costs more than these sweeps."""
    commit, digest, machine = runs.commit(), runs.code_digest(), runs.machine()
    monkeypatch.setattr(runs, "commit", lambda: commit)
    monkeypatch.setattr(runs, "code_digest", lambda: digest)
    monkeypatch.setattr(runs, "machine", lambda: machine)
    made = Site(tmp_path)
    yield made
    assert made.nothing_left(), made.processes()
