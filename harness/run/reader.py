"""One MoE layer of a real checkpoint, from safetensors: gpt-oss MXFP4 and ModelOpt NVFP4 names.

A path is a .safetensors file, or a folder with model.safetensors.index.json or .safetensors files.
Headers are read and checked first: lengths against the file, shapes against byte ranges, dtypes and
names against what the format wants. Only then are the tensors of the one layer read, and of those
only the experts asked for. Every complaint is a UsageError that names the tensor.

gpt-oss: P.gate_up_proj_blocks [E, 2I, H/32, 16] U8 and _scales [E, 2I, H/32] U8, rows gate0, up0,
...; down_proj_blocks [E, H, I/32, 16] and _scales; _bias BF16; P is model.layers.N.mlp.experts.
ModelOpt: P.E.{gate,up,down}_proj.weight U8 [rows, K/2], .weight_scale F8_E4M3 [rows, K/16],
.weight_scale_2 and .input_scale F32, one number each.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from harness import UsageError
from kernels.weights import MoEWeights

MAX_HEADER = 100 << 20  # the format's own limit
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2,
    "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
_GPT_OSS = "gate_up_proj_blocks"
_LAYER = re.compile(r"^(.*\blayers)\.(\d+)\.(.*?experts)\.(.+)$")


@dataclass(frozen=True)
class Entry:
    """Where one tensor is: its file, dtype and shape, all checked against the file's length."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def header(file: Path) -> dict[str, Entry]:
    """Every tensor of one file. UsageError for a file that is no safetensors or is cut short."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
            raise UsageError(
                f"{file.name}: header length {length} does not fit a file of {size} bytes; "
                "it is no safetensors file, or is cut short"
            )
        try:
            parsed = json.loads(stream.read(length))
            if not isinstance(parsed, dict):
                raise ValueError("no object")
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{file.name}: its header is no JSON object ({error})") from None
    data = size - 8 - length
    out = {}
    for name, what in parsed.items():
        if name != "__metadata__":
            out[name] = _entry(file, str(name), what, data)
    return out


def _entry(file: Path, name: str, what: Any, data: int) -> Entry:
    """One tensor's entry, once its shape, dtype and byte range agree with the file."""
    refuse = lambda why: UsageError(f"tensor {name!r} in {file.name}: {why}")
    try:
        dtype, shape, (begin, end) = what["dtype"], what["shape"], what["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise refuse("its header entry lacks dtype, shape or data_offsets") from None
    numbers = [begin, end, *shape] if isinstance(shape, list) else [None]
    if not all(type(x) is int and 0 <= x < 1 << 62 for x in numbers):
        raise refuse(f"shape {shape!r} or offsets {begin!r}, {end!r} are no sizes")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise refuse(f"dtype {dtype!r} is unknown; known: {', '.join(ITEM_BYTES)}")
    count = 1
    for step in shape:
        count *= step
    if count * ITEM_BYTES[dtype] != end - begin:
        raise refuse(f"{dtype} {shape} takes {count * ITEM_BYTES[dtype]} bytes, not {end - begin}")
    if end > data:
        raise refuse(f"it ends at byte {end}, the file holds {data}: the file is cut short")
    return Entry(file, dtype, tuple(shape))


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint by name, and what its config.json says ({} without one)."""

    path: str
    entries: dict[str, Entry]
    config: dict[str, Any]

    @staticmethod
    def open(path: str) -> Checkpoint:
        """Reads the headers of a file or folder; UsageError when there is none to read."""
        return _open(path, _stamp(Path(path)))

    def layers(self) -> list[int]:
        """The layers that hold experts."""
        found = {int(m.group(2)) for m in map(_LAYER.match, self.entries) if m}
        return sorted(found)

    def prefix(self, layer: int) -> str:
        """What the names of a layer's experts begin with; UsageError lists the layers there are."""
        for name in self.entries:
            match = _LAYER.match(name)
            if match and int(match.group(2)) == layer:
                return f"{match.group(1)}.{layer}.{match.group(3)}"
        known = self.layers()
        if not known:
            some = ", ".join(list(self.entries)[:3])
            raise UsageError(
                f"no tensor is named model.layers.{layer}.mlp.experts.*; there are {some}, ..."
            )
        raise UsageError(f"no layer {layer} with experts; layers: {_ranges(known)}")

    def get(self, name: str, dtype: str, rank: int) -> Entry:
        """The entry of a tensor that must be there; UsageError names it and close matches."""
        if name not in self.entries:
            close = get_close_matches(name, self.entries, n=2, cutoff=0.8)
            hint = f"; there is {' and '.join(close)}" if close else ""
            raise UsageError(f"tensor {name!r} is missing{hint}")
        entry = self.entries[name]
        if entry.dtype != dtype:
            raise UsageError(f"tensor {name!r} is {entry.dtype} {list(entry.shape)}; want {dtype}")
        if len(entry.shape) != rank:
            raise UsageError(f"tensor {name!r} has shape {list(entry.shape)}; want {rank} axes")
        return entry

    def describe(self, layer: int) -> dict[str, Any]:
        """The model as `conf/model` has it, from names, shapes and config.json; nothing is read."""
        from harness.run import checkpoint_layers

        return checkpoint_layers.describe(self, layer)

    def layer(self, layer: int, experts: int | None) -> MoEWeights:
        """The first `experts` experts of a layer (None: all), read now."""
        from harness.run import checkpoint_layers

        return checkpoint_layers.read(self, layer, experts)

    def is_gpt_oss(self, prefix: str) -> bool:
        return any(name.startswith(f"{prefix}.gate_up_proj") for name in self.entries)

    def tensor(self, name: str, experts: int | None = None) -> torch.Tensor:
        """Reads one tensor, or the first `experts` of its first axis."""
        entry = self.entries[name]
        try:
            with safe_open(str(entry.file), framework="pt") as file:
                if experts is None:
                    read: torch.Tensor = file.get_tensor(name)
                else:
                    read = file.get_slice(name)[:experts]
        except Exception as error:
            raise UsageError(f"tensor {name!r} in {entry.file.name}: {error}") from None
        if read.dtype.is_floating_point and read.numel() and read.element_size() > 1:
            if not bool(torch.isfinite(read).all()):
                raise UsageError(f"tensor {name!r} holds Inf or NaN")
        return read


def _stamp(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of a checkpoint's files, so that a changed one is read again."""
    if not path.exists():
        raise UsageError(f"source.path={path}: there is no such file or folder")
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    wanted = [f for f in files if f.suffix in (".safetensors", ".json") and f.is_file()]
    return tuple((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in wanted)


@lru_cache(maxsize=4)
def _open(path: str, stamp: tuple[tuple[str, int, int], ...]) -> Checkpoint:
    root = Path(path)
    if root.is_file():
        return Checkpoint(path, header(root), _json(root.parent / "config.json"))
    index = root / "model.safetensors.index.json"
    config = _json(root / "config.json")
    entries: dict[str, Entry] = {}
    if not index.is_file():
        for file in sorted(root.glob("*.safetensors")):
            entries |= header(file)
        if not entries:
            raise UsageError(f"source.path={path}: no .safetensors file in this folder")
        return Checkpoint(path, entries, config)
    weight_map = _json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UsageError(f"{index.name} has no weight_map")
    headers: dict[str, dict[str, Entry]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise UsageError(f"tensor {name!r}: {index.name} places it in {shard!r}, no file name")
        if shard not in headers:
            if not (root / shard).is_file():
                raise UsageError(f"tensor {name!r}: its file {shard} is missing")
            headers[shard] = header(root / shard)
        if name not in headers[shard]:
            raise UsageError(f"tensor {name!r} is not in {shard}, where {index.name} places it")
        entries[name] = headers[shard][name]
    return Checkpoint(path, entries, config)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_text())
    except (ValueError, RecursionError, OSError) as error:
        raise UsageError(f"{path.name} cannot be read as JSON: {error}") from None
    return loaded if isinstance(loaded, dict) else {}


def _ranges(numbers: list[int]) -> str:
    shown = ", ".join(str(n) for n in numbers[:12])
    return shown + (f", ... {numbers[-1]}" if len(numbers) > 12 else "")
