"""`python -m harness show layout=NAME [shape=NxK] [at=n,k] [out=FILE.svg]`: where a layout puts
things.

NAME is a layout's or a vendor's. shape counts elements of the tensor: packed bytes for FP4 values,
one byte a block for scales. at may be given several times. out writes a picture.
"""

from __future__ import annotations

from pathlib import Path

from harness import UsageError, suggest
from kernels import catalog
from kernels.errors import LayoutError
from kernels.layout import Layout

KEYS = ("layout", "shape", "at", "out", "generation", "num_warps", "theme")


def main(argv: list[str]) -> int:
    """Prints the layout; with a shape, its storage; with a place, the element's address."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if argv else 4
    given: dict[str, list[str]] = {}
    for text in argv:
        key, equals, value = text.partition("=")
        if not equals or key not in KEYS:
            raise UsageError(f"no setting {text!r}{suggest(key, list(KEYS))}")
        given.setdefault(key, []).append(value)
    if "layout" not in given:
        raise UsageError(f"give layout=NAME;{suggest('', list(catalog.LAYOUTS))[1:]}")
    try:
        layout = named(given)
        print(describe(layout))
        if "shape" not in given:
            if "at" in given:
                raise UsageError("at= needs shape=NxK: addresses depend on the padded shape")
        else:
            n, k = pair(given["shape"][-1], "shape", "x")
            print(storage(layout, n, k))
            for text in given.get("at", []):
                print(place(layout, n, k, *pair(text, "at", ",")))
        if "out" in given:
            picture(layout, given)
    except LayoutError as error:
        raise UsageError(str(error)) from None
    return 0


def named(given: dict[str, list[str]]) -> Layout:
    """The layout of a name, with the Hopper variants that num_warps and generation choose."""
    layout = catalog.find(given["layout"][-1])
    generation = given.get("generation", ["3.5"])[-1].strip("'\"")
    warps = given.get("num_warps", ["8"])[-1]
    if not warps.isdigit():
        raise UsageError(f"num_warps={warps}: want a whole number")
    chosen = "generation" in given or "num_warps" in given
    if chosen and layout.name.startswith("hopper_scale"):
        return catalog.hopper_scale(int(warps), generation)
    if chosen and layout.name.startswith("hopper_value"):
        return catalog.hopper_value(int(layout.name[len("hopper_value_v")]), generation)
    if chosen:
        raise UsageError(f"layout {layout.name} has no num_warps or generation; only Hopper's have")
    return layout


def pair(text: str, key: str, separator: str) -> tuple[int, int]:
    """Two whole numbers, `5760x90` or `17,3`."""
    parts = text.replace(" ", "").split(separator)
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        raise UsageError(f"{key}={text!r}: write two whole numbers, {key}=17{separator}3")
    return int(parts[0]), int(parts[1])


def describe(layout: Layout) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in layout.sizes.items()) or "none"
    lines = [
        f"layout    {layout.name}",
        f"pattern   {layout.pattern}",
        f"sizes     {sizes}",
        f"align     n to {layout.align[0]}, k to {layout.align[1]}; padding is 0x{layout.fill:02x}",
    ]
    if layout.flip:
        lines.append(
            f"flip      axis {', '.join(layout.flip)} is exchanged (the two halves trade places)"
        )
    if layout.bits:
        lines.append("bits      the 32 bits of each word are permuted (Hopper's twiddle)")
    lines += [
        f"view      {layout.view}: how the consumer's library addresses the storage",
        f"consumer  {layout.consumer}",
        f"aliases   {', '.join(layout.aliases) or 'none'}",
        f"source    {layout.source}",
        f"          {layout.note}",
    ]
    return "\n".join(lines)


def storage(layout: Layout, n: int, k: int) -> str:
    """The padded and stored shape of an n x k matrix, and what padding costs."""
    if not n or not k:
        raise UsageError(f"shape={n}x{k} is empty; give at least 1x1")
    N, K = layout.padded(n, k)
    rows, cols = layout.storage_shape(n, k)
    cost = (
        f"{N * K - n * k} elements of padding, {N * K / (n * k):.3f}x"
        if N * K > n * k
        else "no padding"
    )
    digits = "  ".join(f"{d.name}:{d.size}" for d in layout.digits(n, k))
    shapes = f"{n} x {k}, padded {N} x {K}, stored {rows} x {cols}"
    return f"shape     {shapes} ({cost})\naddress   {digits}"


def place(layout: Layout, n: int, k: int, m: int, c: int) -> str:
    """Where element (m, c) of an n x k matrix is stored, digit by digit."""
    if m >= n or c >= k:
        raise UsageError(f"at={m},{c} lies outside {n} x {k}")
    rows, cols = layout.storage_shape(n, k)
    offset = _offset(layout, n, k, m, c)
    digits = []
    for digit in layout.digits(n, k):
        at = offset // digit.out_stride % digit.size
        digits.append(f"{digit.name}={at}")
    where = f"row {offset // cols}, column {offset % cols} of {rows} x {cols}"
    text = f"at {m},{c}  offset {offset} = {where}\n          digits {'  '.join(digits)}"
    if layout.bits:
        text += "\n          (before the bits of its word are permuted)"
    return text


def _offset(layout: Layout, n: int, k: int, m: int, c: int) -> int:
    """The address from the digits alone, so that no index map of the whole matrix is needed."""
    N, _ = layout.padded(n, k)
    half, row = divmod(m, n // layout.parts)
    position = (half * (N // layout.parts) + row, c)
    offset = 0
    for digit in layout.digits(n, k):
        value = position[digit.dim] // digit.in_stride % digit.size
        offset += (digit.size - 1 - value if digit.flip else value) * digit.out_stride
    return offset


def picture(layout: Layout, given: dict[str, list[str]]) -> None:
    """Writes the drawing of the layout, of the given shape or of one tile."""
    from kernels import draw

    path = Path(given["out"][-1])
    if path.suffix != ".svg":
        raise UsageError(f"out={path}: pictures are .svg files")
    n, k = pair(given["shape"][-1], "shape", "x") if "shape" in given else (None, None)
    try:
        path.write_text(draw.draw(layout, n, k))
    except OSError as error:
        raise UsageError(f"out={path} cannot be written: {error.strerror}") from None
    print(f"picture   {path}")
