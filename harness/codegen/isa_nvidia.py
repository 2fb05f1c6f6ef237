"""Reads what triton made for an NVIDIA target: names from PTX, everything else from SASS.

PTX names matrix and tensor-memory instructions readably (kind, shape, operand types); only SASS,
the machine code in the cubin, says how wide a load really is, how many instructions there are and
whether registers were spilled. The disassembler is the one in triton's package, so no CUDA toolkit
is needed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

_SASS = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);", re.M)
_PTX = re.compile(
    r"^\s*(?:@!?%?\w+\s+)?((?:tcgen05|wgmma\.mma_async|mma\.sync|cp\.async\.bulk)[\w.:]*)", re.M
)
_WIDTH = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_MATRIX = ("HMMA", "HGMMA", "IMMA", "IGMMA", "QMMA", "QGMMA", "OMMA", "UTCHMMA", "UTCQMMA",
           "UTCOMMA",
           "UTCIMMA", "DMMA")  # fmt: skip
_KIND = re.compile(r"\.(kind::\w+|block_scale|scale_vec::\w+|e\dm\d|bf16|f16|tf32|m\d+n\d+k\d+)")


def _bytes(opcode: str) -> int:
    """Bytes a lane moves: the width modifier, or 4."""
    return next((_WIDTH[part] for part in opcode.split(".")[1:] if part in _WIDTH), 4)


def parse_sass(text: str) -> dict[str, Any]:
    """Counts of one kernel's machine code. Raises ValueError when there is none."""
    found = _SASS.findall(text)
    if not found:
        raise ValueError("no SASS instruction found: zero kernels parsed")
    loads, stores, copies, reads, writes = (Counter[int]() for _ in range(5))
    names: Counter[str] = Counter()
    for _, opcode, _operands in found:
        base = opcode.split(".")[0]
        names[base] += 1
        table = {"LDG": loads, "STG": stores, "LDGSTS": copies, "LDS": reads, "STS": writes}.get(
            base
        )
        if table is not None:
            table[_bytes(opcode)] += 1
        elif base in ("LDSM", "STSM"):  # 16 bytes a lane for .4, less for .2 and .1
            (reads if base == "LDSM" else writes)[
                4 * int(opcode[-1]) if opcode[-1] in "24" else 4
            ] += 1
        elif base in ("UTMALDG", "UBLKCP"):
            copies[128] += 1
    address = int(found[-1][0], 16)
    step = int(found[1][0], 16) - int(found[0][0], 16) if len(found) > 1 else 16
    return {
        "instructions": sum(names.values()) - names["NOP"],
        "code_bytes": address + step,
        "global_loads": _widths(loads), "global_stores": _widths(stores),
        "async_copies": _widths(copies),
        "shared_loads": _widths(reads), "shared_stores": _widths(writes),
        "spills": names["LDL"] + names["STL"],
        "barriers": names["BAR"] + names["SYNCS"],
        "matrix_sass": {n: c for n, c in sorted(names.items()) if n in _MATRIX},
        "scale_sass": {n: names[n] for n in ("UTCCP", "STTM") if names[n]},
    }  # fmt: skip


def parse_ptx(text: str) -> dict[str, Any]:
    """Matrix instructions by kind and scale-path instructions by name."""
    matrix, scale = Counter[str](), Counter[str]()
    for name in _PTX.findall(text):
        if name.startswith(("wgmma.mma_async", "mma.sync", "tcgen05.mma")):
            kind = ".".join(_KIND.findall(name))
            if name.startswith(
                "tcgen05"
            ):  # triton 3.6's scale_vec::2X is 3.9's block32: kind says it
                kind = kind.replace(".scale_vec::2X", "")
            head = re.match(r"wgmma|mma|tcgen05\.mma", name)
            matrix[f"{head.group() if head else name} {kind}".strip()] += 1
        elif name.startswith("tcgen05.cp"):
            scale["tcgen05.cp " + name.rsplit(".", 1)[-1]] += 1
        elif name.startswith("tcgen05.st"):
            scale["tcgen05.st"] += 1
    return {"matrix": dict(sorted(matrix.items())), "scale_path": dict(sorted(scale.items()))}


def parse_resources(text: str) -> dict[str, int]:
    """Registers and stack bytes a thread, of `cuobjdump -res-usage`."""
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if not match:
        raise ValueError("no resource usage found in the cubin: zero kernels parsed")
    return {"registers": int(match[1]), "stack_bytes": int(match[2])}


def read(asm: dict[str, Any]) -> dict[str, Any]:
    """The record of one compiled kernel from its `ptx` and `cubin`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        sass = _cuobjdump("-sass", file.name)
        usage = _cuobjdump("-res-usage", file.name)
    return parse_ptx(asm["ptx"]) | parse_sass(sass) | parse_resources(usage)


def _cuobjdump(flag: str, path: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    done = subprocess.run([str(tool), flag, path], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise ValueError(f"cuobjdump {flag}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _widths(counts: Counter[int]) -> dict[str, int]:
    return {str(width): counts[width] for width in sorted(counts)}
