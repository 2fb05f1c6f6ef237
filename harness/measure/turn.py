"""One measured process for a device: a lock file, named after the GPU's UUID, around timing.

Two sweeps, or a sweep and a benchmark, then measure in turn. The lock goes with the process that
held it. The files stay in the temporary directory; they are empty.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from harness.rows import safe_name


def lock_file(device: torch.device) -> Path:
    """The same file for every process that may measure on this device."""
    name = "cpu"
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        name = str(getattr(found, "uuid", None) or f"{found.name}-{device.index or 0}")
    return Path(tempfile.gettempdir()) / f"fp4-moe-timing-{safe_name(name)}.lock"


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """Waits until no other process measures on the device."""
    path = lock_file(device)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        handle = os.open(path, flags)  # perhaps another user's, which may be locked, not written
    except FileNotFoundError:
        handle = os.open(path, flags | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
