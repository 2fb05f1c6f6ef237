"""Reads what triton made for an AMD target: the amdgcn text carries instructions and resources
both."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

_LINE = re.compile(r"^\t([a-z][a-z0-9_]+)(?:[ \t]+(.*))?$", re.M)
_WIDTHS = (
    ("x4", 16), ("b128", 16), ("x3", 12), ("b96", 12), ("x2", 8), ("b64", 8),
    ("dword", 4), ("b32", 4),
    ("short", 2), ("u16", 2), ("i16", 2), ("b16", 2), ("byte", 1), ("u8", 1), ("i8", 1), ("b8", 1),
)  # fmt: skip


def _bytes(name: str) -> int:
    """Bytes a lane moves, of the width at the end of a mnemonic (a 2addr form moves two)."""
    width = next((size for token, size in _WIDTHS if token in name.rsplit("_", 2)[-1]), None)
    if width is None:
        width = next((size for token, size in _WIDTHS if token in name), 4)
    return width * (2 if "2addr" in name or re.match(r"ds_(read|write)2", name) else 1)


def parse(text: str) -> dict[str, Any]:
    """The record of one kernel's amdgcn. Raises ValueError when it holds no instruction or
    resources."""
    body = text.split(".amdhsa_kernel")[0]
    found = [
        (name, rest or "") for name, rest in _LINE.findall(body) if not name.startswith("p2align")
    ]
    names = Counter(name for name, _ in found)
    if not names.get("s_endpgm"):
        raise ValueError("no amdgcn instruction found: zero kernels parsed")
    loads, stores, copies, reads, writes = (Counter[int]() for _ in range(5))
    matrix, scale = Counter[str](), Counter[str]()
    for name, rest in found:
        if name.startswith("tensor_load"):
            copies[128] += 1
        elif name.startswith(("global_load", "buffer_load", "flat_load")):
            to_lds = "_lds" in name or re.search(r"\blds\b", rest)
            (copies if to_lds else loads)[_bytes(name)] += 1
        elif name.startswith(("global_store", "buffer_store", "flat_store")):
            stores[_bytes(name)] += 1
        elif name.startswith(("ds_read", "ds_load")):
            reads[_bytes(name)] += 1
        elif name.startswith(("ds_write", "ds_store")):
            writes[_bytes(name)] += 1
        elif name.startswith(("v_mfma", "v_wmma", "v_smfmac", "v_swmmac")):
            matrix[name] += 1
        elif name.startswith("v_cvt_scale"):
            scale[re.sub(r"_e\d\d$", "", name)] += 1
    scale.update({n: c for n, c in matrix.items() if "_scale_" in n})
    vgpr, agpr = _number(text, r"\.vgpr_count:\s+(\d+)"), _number(text, r"\.agpr_count:\s+(\d+)", 0)
    spilled = sum(_number(text, rf"\.{kind}_spill_count:\s+(\d+)", 0) for kind in ("vgpr", "sgpr"))
    scratch = sum(c for n, c in names.items() if n.startswith(("scratch_load", "scratch_store")))
    return {
        "instructions": sum(c for n, c in names.items() if n != "s_nop"),
        "code_bytes": _number(text, r"codeLenInByte = (\d+)"),
        "global_loads": _widths(loads), "global_stores": _widths(stores),
        "async_copies": _widths(copies),
        "shared_loads": _widths(reads), "shared_stores": _widths(writes),
        "registers": vgpr, "agpr": agpr, "sgpr": _number(text, r"\.sgpr_count:\s+(\d+)"),
        "spills": max(spilled, scratch),
        "stack_bytes": _number(text, r"\.private_segment_fixed_size:\s+(\d+)", 0),
        "barriers": sum(c for n, c in names.items() if n.startswith("s_barrier")),
        "matrix": dict(sorted(matrix.items())), "scale_path": dict(sorted(scale.items())),
        "waves_per_simd": _number(text, r"; Occupancy: (\d+)"),
    }  # fmt: skip


def read(asm: dict[str, Any]) -> dict[str, Any]:
    """The record of one compiled kernel from its `amdgcn`."""
    return parse(asm["amdgcn"])


def _number(text: str, pattern: str, default: int | None = None) -> int:
    match = re.search(pattern, text)
    if match:
        return int(match[1])
    if default is None:
        raise ValueError(
            f"amdgcn text lacks {pattern!r}: the parser does not know this compiler's form"
        )
    return default


def _widths(counts: Counter[int]) -> dict[str, int]:
    return {str(width): counts[width] for width in sorted(counts)}
