"""One side of `gate ab`, started by `ab_pair`: `python -m harness.gate.ab_worker FOLDER SOCKET`.

Imports `kernels` from the side's own folder and the harness from where this file is, without
touching a GPU; then forks one child for each line `NUMBER` on stdin. A forked child has a GPU
context, an allocator and loaded kernels of its own; the imported libraries are all it shares. The
child builds the work it is asked for, says so over the socket, waits for its turn, measures,
answers and ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


def main(folder: str, address: str) -> None:
    sys.path.insert(0, folder)
    import kernels

    sys.path.remove(folder)
    found = Path(kernels.__file__).resolve().parent.parent
    if found != Path(folder).resolve():
        raise SystemExit(f"kernels came from {found}, not from {folder}")

    for routine in getattr(kernels, "ROUTINES", ()):
        for impl in ("reference", "fused"):
            with suppress(Exception):  # a revision that lacks it says so when it is asked for it
                kernels.resolve(routine, impl)
    if torch.cuda.is_initialized():
        raise SystemExit("importing kernels touched the GPU, so no fresh context can be forked")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    for line in sys.stdin:
        if os.fork() == 0:
            code = 1
            try:
                child(int(line), address)
                code = 0
            finally:
                os._exit(code)


def child(number: int, address: str) -> None:
    """Build, wait, measure, answer: JSON lines over the socket."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(address)
        with link.makefile("rw") as file:

            def say(message: dict[str, Any]) -> None:
                file.write(json.dumps(message) + "\n")
                file.flush()

            say({"number": number, "pid": os.getpid()})
            request = json.loads(file.readline())
            try:
                works, failed = build(request)
                say({"ready": True})
                say(measure(json.loads(file.readline()), request, works, failed))
                # Stay until the round is over: a context that is torn down disturbs the next one.
                file.readline()
            except Exception as error:
                say({"error": f"{type(error).__name__}: {error}"[:2000]})


def build(request: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The works of the cases asked for, compiled; and why the others cannot be built."""
    import kernels
    from harness.gate import ab_suite

    device = torch.device(request["device"])
    make = ab_suite.Inputs(device, request["experts"])
    works, failed = {}, {}
    for name in request["cases"]:
        try:
            works[name] = ab_suite.build(
                name, lambda routine: kernels.resolve(routine, request["impl"]), make
            )
        except Exception as error:  # a routine that one side lacks, or that refuses
            failed[name] = f"{type(error).__name__}: {error}"[:500]
    if device.type == "cuda":
        torch.cuda.synchronize()
    return works, failed


def measure(
    go: dict[str, Any], request: dict[str, Any], works: dict[str, Any], failed: dict[str, str]
) -> dict[str, Any]:
    """Times of every case; with `probe`, also memory, launches and the digests of the code."""
    from harness.measure import memory, telemetry, timing

    device = torch.device(request["device"])
    out: dict[str, dict[str, Any]] = {}
    for name, work in works.items():
        time, absent = timing.measure(
            work.fn,
            device=device,
            timing=request["timing"],
            useful_bytes=work.useful_bytes,
            copy_gb_per_s=go["copy_gb_per_s"],
            siblings=go["siblings"],
        )
        out[name] = {"time": time, "absent": absent}
        if request["probe"]:
            out[name]["memory"] = memory.measure(work.fn, device)
            if device.type == "cuda":
                names = memory.launches(work.fn)
                out[name] |= {"launches": names, "isa": isa(set(names))}
    state = telemetry.snapshot(device)
    return {
        "cases": out,
        "failed": failed,
        "environment": {
            "device": timing.device_name(device),
            "driver_major": telemetry.driver_major(state),
            "torch": torch.__version__,
            "triton": _triton(),
        },
    }


def _triton() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def isa(launched: set[str]) -> dict[str, list[str]]:
    """Digests of the machine code loaded in this process for the kernels launched, by name."""
    out: dict[str, list[str]] = {}
    for module in [m for n, m in list(sys.modules.items()) if n.startswith("kernels.")]:
        for function in vars(module).values():
            for cache in getattr(function, "device_caches", {}).values():
                for kernel in getattr(cache[0], "values", dict)():
                    name = getattr(kernel, "name", None)
                    code = getattr(kernel, "asm", {}).get("cubin") or getattr(
                        kernel, "asm", {}
                    ).get("hsaco")
                    if name in launched and code:
                        out.setdefault(name, []).append(hashlib.sha256(code).hexdigest())
    return {name: sorted(set(digests)) for name, digests in out.items()}


if __name__ == "__main__":
    main(*sys.argv[1:3])
