"""The child's side of `env_worker`: answers requests under the versions of its env.

One JSON object a line comes in on stdin, `{"op": NAME, ...fields}`, and one goes out, `{"value":
...}` or `{"error": ..., "absent": whether an import failed}`. What libraries print goes to stderr.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import IO, Any

OPS: dict[str, str] = {  # op -> module:function in the child, called with the request's fields
    "hello": "harness.env.child:hello",
    "cell": "harness.env.child:cell",
    "layouts": "harness.vendor.table:measure",
    "tensors": "harness.compare.versions:tensors",
}


def hello(vendors: bool = False) -> dict[str, Any]:
    """What this process imports: versions, whose `kernels`, and with `vendors` each vendor's
    probe."""
    import kernels
    from harness.vendor import VENDORS, probe

    versions = {"python": sys.version.split()[0]}
    for name in ("torch", "triton"):
        try:
            versions[name] = str(importlib.import_module(name).__version__)
        except ImportError as error:
            versions[name] = f"not importable ({error})"
    if vendors:
        for name in VENDORS:
            found = probe(name)
            versions[name] = found.version or f"not installed ({found.reason})"
    return {
        "versions": versions,
        "kernels": str(kernels.__file__),
        "env": os.environ.get("HARNESS_ENV"),
    }


def cell(cell: dict[str, Any], ctx: dict[str, Any]) -> dict[str, Any]:
    """One row, computed here."""
    from harness.env import impls
    from harness.env.worker import is_own
    from harness.run.cell import run_cell
    from harness.vendor import VENDORS, probe, show_unwritten

    if not is_own(cell) and not impls.device(cell["impl"]["name"], cell["hw"]).type == "cuda":
        show_unwritten()  # not on a GPU, where filling would count in a time
    row: dict[str, Any] = run_cell(cell, ctx)
    if (impl := cell["impl"]["name"]) in VENDORS:
        row["provenance"][impl] = probe(impl).version or "not installed"
    return row


def serve(stdin: IO[bytes], answer: IO[bytes]) -> None:
    """Answers requests until stdin ends; an op that raises is answered with its error.

    `last: true` in an answer says that this process can serve no other: the GPU's context is lost.
    """
    resolved: dict[str, Callable[..., Any]] = {}
    for line in stdin:
        request = json.loads(line)
        op = request.pop("op")
        try:
            if op not in resolved:
                module, _, function = OPS[op].partition(":")
                resolved[op] = getattr(importlib.import_module(module), function)
            reply: dict[str, Any] = {"value": resolved[op](**request)}
        except Exception as error:  # the parent makes a row of it
            traceback.print_exc()
            reply = {
                "error": f"{op}: {type(error).__name__}: {error}",
                "absent": isinstance(error, ImportError),
            }
        if lost_context():
            reply["last"] = True
        answer.write(_encoded(op, reply))
        answer.flush()


def lost_context() -> bool:
    """Whether a fault (an illegal address, a device-side assert) ended this process's context."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:  # whatever it says: no later call can work either
        return True
    return False


def _encoded(op: str, reply: dict[str, Any]) -> bytes:
    """The reply as a line; a value that JSON cannot hold is an error of the op."""
    try:
        return json.dumps(reply, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        words = f"{op}: its result cannot be sent: {type(error).__name__}: {error}"
        return json.dumps({"error": words, "absent": False}).encode() + b"\n"


def main() -> int:
    """The child: answers go to the real stdout, and whatever libraries print to stderr.

    It ends with its parent: by the end of stdin when it waits, by the kernel when it computes.
    """
    faulthandler.enable()  # a segfault says on stderr where it was
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        pipe = select.poll()
        pipe.register(0, 0)
        if pipe.poll(0):  # hung up: the parent ended before the kernel was told to watch it
            return 1
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)
        serve(sys.stdin.buffer, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
