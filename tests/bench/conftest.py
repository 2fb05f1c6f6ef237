"""`make bench`: bench_*.py is collected here, and only when benchmarks are asked for."""

from pathlib import Path

import pytest


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    wanted = parent.config.getoption("benchmark_only", default=False)
    if wanted and file_path.name.startswith("bench_") and file_path.suffix == ".py":
        return pytest.Module.from_parent(parent, path=file_path)
    return None
