"""Implementations that other packages offer, so that a patch is checked and timed without a fork.

A package declares the entry-point group `harness.env.impls`; the entry's name becomes a value of
`impl=`:

    [project.entry-points."harness.env.impls"]
    mylab = "mylab.fp4"            # a module with functions named like routines of `kernels`
    mylab2 = "mylab.fp4:ROUTINES"  # or a dict {routine name: function}

Each is given the arguments of the routine of that name. For one function of your own there is
`impl.import=module:function`, without a package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

GROUP = "harness.env.impls"


@lru_cache(maxsize=1)
def found() -> dict[str, EntryPoint]:
    """impl name -> entry point, of every installed package."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def routine(impl: str, name: str) -> Callable[..., Any] | None:
    """The plugin's function for a routine, or None where it offers none. ImportError if it is
    broken."""
    offered = found()[impl].load()
    function = offered.get(name) if isinstance(offered, Mapping) else getattr(offered, name, None)
    return function if callable(function) else None
