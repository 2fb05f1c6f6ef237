"""The folder of a run: made with its frozen grid, or taken up again where it stopped.

manifest.json holds the whole grid, the machine, versions, the commit and a digest of the code, and
is written before the first cell. `take_up` finds what a stopped run lacks; it refuses when code,
config or versions are not those that the finished rows came from.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from harness import ROOT, UsageError, rows
from harness.plan import grid


def make_folder(planned: grid.Grid, argv: list[str]) -> Path:
    """The run folder with its manifest. UsageError when the name is taken or cannot be written."""
    given = planned.run["run_id"]
    if given is not None and rows.safe_name(str(given)) != str(given):
        raise UsageError(f"run_id={given!r}: use letters, digits, dot, dash and underscore")
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    folder = Path(planned.run["out"]) / str(given or f"{stamp}-{uuid4().hex[:4]}")
    try:
        folder.mkdir(parents=True, exist_ok=False)
    except FileExistsError:
        raise UsageError(f"{folder} exists; choose another run_id") from None
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror}; set out=FOLDER") from None
    manifest = {
        "schema": rows.SCHEMA, "run_id": folder.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"), "overrides": argv,
        "machine": machine(), **commit(), "code": code_digest(),
        "count": len(planned.cells), **grid.freeze(planned.cells),
    }  # fmt: skip
    try:  # whole or not at all: a folder without a manifest is no run
        (folder / ".manifest.json").write_text(json.dumps(manifest, indent=None))
        (folder / ".manifest.json").replace(folder / "manifest.json")
    except OSError as error:
        raise UsageError(f"{folder}/manifest.json cannot be written: {error.strerror}") from None
    return folder


def take_up(argv: Sequence[str], planned: grid.Grid) -> tuple[Path, grid.Grid]:
    """(folder, its whole grid) of the run that resume= names.

    UsageError when the grid of `argv` is not the run's, or when code or versions changed since it
    began, unless resume_force=true; then the run's own grid is used.
    """
    folder = rows.run_dir(str(planned.run["resume"]), Path(planned.run["out"]))
    manifest = rows.manifest(folder)
    asked, began = _of_cells(argv), _of_cells(manifest["overrides"])
    again = planned if asked else grid.plan(began)
    frozen = json.loads(json.dumps(grid.freeze(again.cells)))
    changed = {
        "the code": manifest.get("code") != code_digest(),
        "the versions": manifest["machine"]["versions"] != machine()["versions"],
        "the grid": frozen["cells"] != manifest["cells"] or frozen["groups"] != manifest["groups"],
    }
    if any(changed.values()) and not planned.run["resume_force"]:
        what = " and ".join(name for name, differs in changed.items() if differs)
        raise UsageError(
            f"{folder}: {what} changed since this run began, so its rows and new ones would not "
            "belong together; start a new run, or say resume_force=true"
        )
    return folder, grid.Grid(grid.thaw(manifest), planned.run, began)


def _of_cells(overrides: Sequence[str]) -> list[str]:
    """The overrides that say what the cells are, not how or where they run."""
    keys = [(text.split("=")[0].lstrip("+~"), text) for text in overrides]
    return [t for key, t in keys if key not in grid.RUN_KEYS and not key.startswith("hydra")]


def finished(folder: Path, planned: grid.Grid) -> list[rows.Row]:
    """The rows that a run has, one a cell."""
    return one_a_cell(rows.read(folder), planned)


def one_a_cell(
    found: Sequence[rows.Row], planned: grid.Grid, done: Sequence[rows.Row] = ()
) -> list[rows.Row]:
    """The last row of each cell of the grid that is not in `done`."""
    known = {cell["key"] for cell in planned.cells} - {key_of(row["cell"]) for row in done}
    return list({key: row for row in found if (key := key_of(row["cell"])) in known}.values())


def key_of(cell: dict[str, Any]) -> str:
    return " ".join(f"{name}={cell[name]}" for name in cell)


def code_digest() -> str:
    """sha256 over the sources and the config of this checkout, in the order of their names."""
    digest = sha256()
    for folder, pattern in (("kernels", "*.py"), ("harness", "*.py"), ("conf", "*.yaml")):
        for path in sorted((ROOT / folder).rglob(pattern)):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return f"sha256:{digest.hexdigest()}"


def machine() -> dict[str, Any]:
    """Processor, cores, memory, GPUs and versions; nothing that names the host."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from harness.measure.timing import device_name

    versions = {}
    for name in ("torch", "triton", "hydra-core", "safetensors", "einops", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "processor": device_name("cpu"), "cores": os.cpu_count(), "gpus": gpus,
        "memory_bytes": psutil.virtual_memory().total, "system": platform.system(),
        "python": platform.python_version(), "versions": versions,
    }  # fmt: skip


def commit() -> dict[str, Any]:
    """The commit of this checkout and whether it was changed since; null outside of one."""
    git = lambda *args: subprocess.run(
        ["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=True
    ).stdout.strip()
    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "-uno")),
        }
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}
