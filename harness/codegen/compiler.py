"""Compiles a Triton kernel for a target that is not here, and reads the code it gets.

A kernel launch is described as data (`kernels.fused.consume.Launch`, or any mapping of the same
fields), so it is compiled in another process, `codegen_worker`; two of them use two cores. Records
are kept on disk by (source, options, target, triton version) and by the parsers' own source: a
changed kernel, option, compiler or parser is compiled again, nothing else is.

A record: instructions, code_bytes, registers (agpr, sgpr), spills, stack_bytes, shared_bytes, loads
and stores by bytes a lane, async copies, matrix instructions by kind, scale-path instructions,
barriers, occupancy. A kernel of which nothing could be parsed raises; it is never an empty record.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness import ROOT
from harness.codegen.chips import CHIPS, chip

Record = dict[str, Any]
FIELDS = ("module", "kernel", "pointers", "integers", "constants", "num_warps", "num_stages")
WORKER = "harness.codegen.worker"
READERS = (WORKER, "harness.codegen.isa_nvidia", "harness.codegen.isa_amd", "harness.codegen.chips")
CACHE_VARIABLE = "HARNESS_CACHE"  # where records are kept; default: the user's cache folder


class CompileError(RuntimeError):
    """The compiler refused a kernel, or crashed; the message is its own."""


def describe(launch: Any, arch: str) -> dict[str, Any]:
    """The JSON form of a launch on an architecture, with integers reduced to what the compiler
    sees.

    triton specialises an integer on being 1 and on being a multiple of 16, and on nothing else.
    """
    get: Any = launch.get if isinstance(launch, Mapping) else lambda name: getattr(launch, name)
    spec = {name: get(name) for name in FIELDS} | {"arch": arch}
    seen: Any = lambda v: 1 if v == 1 else 16 if v % 16 == 0 else 7
    spec["integers"] = {
        n: [seen(one) for one in v] if isinstance(v, tuple | list) else seen(v)
        for n, v in spec["integers"].items()
    }
    options = launch.get("options") if isinstance(launch, Mapping) else None
    return json.loads(json.dumps(spec | {"options": options or {}}))


def compile_one(launch: Any, arch: str) -> Record:
    """The record of one launch. Raises CompileError, or ValueError when nothing could be parsed."""
    return compile_many([(launch, arch)])[0]


def compile_many(
    work: Iterable[tuple[Any, str]], jobs: int | None = None, *, errors: bool = False
) -> list[Record]:
    """Records of many launches, in order; what is not in the cache is compiled by `jobs` processes.

    errors: a refusal becomes {"error": sentence} in place of an exception.
    """
    specs = [describe(launch, arch) for launch, arch in work]
    keys = [key(spec) for spec in specs]
    records: dict[str, Record] = {}
    todo: dict[str, dict[str, Any]] = {}
    for name, spec in zip(keys, specs, strict=True):
        chip(spec["arch"])
        path = cache_dir() / f"{name}.json"
        if path.is_file():
            records[name] = json.loads(path.read_text())
        else:
            todo.setdefault(name, spec)
    queue, lock = list(todo.items()), threading.Lock()

    def work_off(worker: int) -> None:
        while True:
            with lock:
                if not queue:
                    return
                name, spec = queue.pop(0)
            records[name] = record = _ask(worker, spec)
            if "error" not in record:
                _keep(name, record)

    count = min(len(queue), jobs or min(2, os.cpu_count() or 1))
    threads = [threading.Thread(target=work_off, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [records[name] for name in keys]
    for spec, record in zip(specs, found, strict=True):
        if "error" in record and not errors:
            raise CompileError(f"{spec['kernel']} for {spec['arch']}: {record['error']}")
    return [dict(record) for record in found]


def key(spec: Mapping[str, Any]) -> str:
    """Cache key: the description, the kernel's source with all it imports of ours, compiler,
    parsers."""
    text = json.dumps(spec, sort_keys=True) + triton_version() + _source(spec["module"])
    text += "".join(_file(module).read_text() for module in READERS)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def triton_version() -> str:
    """The installed triton's version, without importing it."""
    return metadata.version("triton")


def cache_dir() -> Path:
    """Where records are kept."""
    if path := os.environ.get(CACHE_VARIABLE):
        return Path(path) / "codegen"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fp4-moe-layouts" / "codegen"


@cache
def _source(module: str) -> str:
    """Text of a module and of every module of this project that it imports."""
    text = _file(module).read_text()
    inner = re.findall(
        r"^from ((?:kernels|harness)[\w.]*) import|^import (kernels[\w.]*)", text, re.M
    )
    return text + "".join(
        _source(name) for pair in inner for name in pair if name and name != module
    )


def _file(module: str) -> Path:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise CompileError(f"no module {module!r} to compile a kernel of")
    return Path(spec.origin)


def _keep(name: str, record: Record) -> None:
    folder = cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{name}.{os.getpid()}.{threading.get_ident()}"
    partial.write_text(json.dumps(record, sort_keys=True))
    partial.replace(folder / f"{name}.json")


_workers: dict[int, subprocess.Popen[str]] = {}


def _ask(worker: int, spec: dict[str, Any]) -> Record:
    """One description to worker number `worker`; a worker that died has crashed on it."""
    process = _workers.get(worker)
    if process is None or process.poll() is not None:
        process = _workers[worker] = _start()
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(spec) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line:
        code = process.wait()
        _workers.pop(worker, None)
        return {"error": f"the compiler process ended with {code} on this kernel"}
    return dict(json.loads(line))


def _start() -> subprocess.Popen[str]:
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    root = str(ROOT)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    if triton_version().startswith("3.4.") and (no_op := shutil.which("true")):
        # 3.4 calls ROCm's linker for an object file that nothing here reads; its text comes
        # earlier.
        environment.setdefault("TRITON_HIP_LLD_PATH", no_op)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", WORKER], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    atexit.register(_stop, process)
    return process


def _stop(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
    if process.stdout is not None:
        process.stdout.close()


def for_cell(cell: Mapping[str, Any]) -> dict[str, Any] | None:
    """The code that reads what a cell prepared (impl=fused: and prepares it), for its target:
    {"target", "triton", "canary_spills", "kernels"}.

    None for a target no compiler here knows (cpu) and for a cell that no kernel here consumes.
    """
    from harness.check import consumers
    from harness.codegen import preparers

    arch = cell["hw"]["arch"]
    if arch not in CHIPS:
        return None
    launches: dict[str, Any] = {**consumers.of_cell(cell), **preparers.of_cell(cell)}
    if not launches:
        return None
    work = [*launches.values(), canary_launch(arch)]
    *records, canary = compile_many([(launch, arch) for launch in work], errors=True)
    return {
        "target": arch, "triton": triton_version(), "canary_spills": canary.get("spills", 0),
        "kernels": dict(zip(launches, records, strict=True)),
    }  # fmt: skip


def canary_launch(arch: str) -> dict[str, Any]:
    """The launch of `harness.codegen.canary`'s kernel, described without importing triton here.

    Each lane must hold 128 fp32 values in fewer registers than that: 32 by decree on NVIDIA; on AMD
    what is left of 512 (gfx1250: 1024) when that many waves must fit a SIMD.
    """
    target = chip(arch)
    limit = {"waves_per_eu": 16 if arch == "gfx1250" else 8}
    return {
        "module": "harness.codegen.canary", "kernel": "canary_kernel",
        "pointers": {"x_ptr": "*fp32", "y_ptr": "*fp32"}, "integers": {},
        "constants": {"BLOCK": 128 * target.warp}, "num_warps": 1, "num_stages": 1,
        "options": {"maxnreg": 32} if target.backend == "cuda" else limit,
    }  # fmt: skip
