"""Longest tests first: two workers then end together, not one long after the other."""

from __future__ import annotations

import pytest

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
