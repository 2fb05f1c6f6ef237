"""The compiler process of `codegen`: one kernel description a line in, one record a line out.

It is never in triton's interpreter mode, which is decided when a kernel's module is imported, and
takes only itself down when LLVM aborts.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from harness.codegen import isa_amd, isa_nvidia
from harness.codegen.chips import chip

Record = dict[str, Any]


def build(spec: Mapping[str, Any]) -> Record:
    """Compile one description in this process and read its code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = chip(spec["arch"])
    kernel = getattr(import_module(spec["module"]), spec["kernel"])
    signature: dict[str, str | tuple[str, ...]] = {}
    constants: dict[str | tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, name in enumerate(kernel.arg_names):
        if name in spec["pointers"]:
            signature[name] = spec["pointers"][name]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(several := spec["integers"].get(name), list):
            signature[name] = tuple("constexpr" if one == 1 else "i32" for one in several)
            for j, one in enumerate(several):
                if one == 1:
                    constants[(i, j)] = 1
                elif one % 16 == 0:
                    attributes[(i, j)] = [["tt.divisibility", 16]]
        elif name in spec["integers"]:
            one = spec["integers"][name]
            signature[name] = "constexpr" if one == 1 else "i32"
            if one == 1:
                constants[(i,)] = 1
            elif one % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "constexpr"
            constants[(i,)] = _tuples(spec["constants"][name])
    options = {
        "num_warps": spec["num_warps"],
        "num_stages": spec["num_stages"],
        "enable_fp_fusion": True,
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget(target.backend, target.arch, target.warp),
        options=options | spec["options"],
    )  # fmt: skip
    record = (isa_nvidia if target.backend == "cuda" else isa_amd).read(compiled.asm)
    shared = int(compiled.metadata.shared)
    occupancy = target.occupancy(
        record["registers"] + record.get("agpr", 0),
        shared,
        spec["num_warps"],
        record.pop("waves_per_simd", None),
    )
    return {
        "kernel": spec["kernel"], "target": spec["arch"], "triton": triton.__version__,
        "num_warps": spec["num_warps"], "num_stages": spec["num_stages"],
        "shared_bytes": shared, "occupancy": occupancy, **record,
    }  # fmt: skip


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def serve() -> None:
    """One description a line in, one record a line out, until the input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # compilers print where they like
    for line in sys.stdin:
        try:
            record = build(json.loads(line))
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            record = {"error": f"{type(cause).__name__}: {str(cause).strip()[-400:]}"}
        out.write(json.dumps(record) + "\n")
        out.flush()


if __name__ == "__main__":
    serve()
