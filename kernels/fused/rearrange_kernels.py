"""The two layout kernels and the in-place exchange, in Triton; `plan` gives them their arguments.

Names in capitals are compile-time, and few: sizes of digits and of the tile, never the tensor's. So
shapes share compilations unless alignment or a tile that is larger than the matrix sets them apart.
Offsets between matrices are 64-bit; inside one they are 32-bit unless it passes 2^31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.fused.rescale import one_global_scale


@triton.jit
def rows_kernel(
    source, storage, global_scales,
    per_run, count, blocks, inferred, valid, strides, storage_stride,
    SIZES: tl.constexpr, DIMS: tl.constexpr, MULTS: tl.constexpr, BASE: tl.constexpr,
    UNITS: tl.constexpr, VECTOR: tl.constexpr, PADDED: tl.constexpr, FILL: tl.constexpr,
    WIDE: tl.constexpr, WORD: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Whole runs change places: UNITS vectors of the storage, each with its source found by
    division.

    All sizes and strides count vectors. global_scales: None, or [matrices, 2] fp32 for e4m3 bytes
    whose parts are to share one.
    """
    pid = tl.program_id(0)
    matrix = (pid // blocks).to(tl.int64)
    unit = (pid % blocks) * UNITS + tl.arange(0, UNITS)
    run = unit // per_run
    c = unit - run * per_run
    p = tl.zeros_like(run) + BASE[0]
    h = tl.zeros_like(run) + BASE[1]
    for d in tl.static_range(len(SIZES)):
        size = inferred if SIZES[d] == 0 else SIZES[d]
        digit = run if d == len(SIZES) - 1 else run % size
        run = run // size
        if DIMS[d] == 0:
            p += digit * MULTS[d]
        else:
            h += digit * MULTS[d]
    if WIDE:
        p, h, c, unit = p.to(tl.int64), h.to(tl.int64), c.to(tl.int64), unit.to(tl.int64)
    lane = tl.arange(0, VECTOR)[None, :]
    there = storage + matrix * storage_stride * VECTOR + (unit * VECTOR)[:, None] + lane
    at = (p * strides[1] + h * strides[2] + c * strides[3]) * VECTOR
    here = source + matrix * strides[0] * VECTOR + at[:, None] + lane
    inside = unit < count
    known = inside & (h < valid[0]) & (c < valid[1]) if PADDED else inside
    if BACK:
        tl.store(here, tl.load(there, mask=known[:, None]), mask=known[:, None])
    else:
        x = tl.load(here, mask=known[:, None], other=FILL)
        if global_scales is not None:
            x = one_global_scale(x, p[:, None], global_scales + 2 * matrix, WORD)
        tl.store(there, x, mask=inside[:, None])


@triton.jit
def tile_kernel(
    source, storage, global_scales,
    counts, outs, row_out, valid, padded, strides, storage_stride, half,
    GRID_DIMS: tl.constexpr, GRID_MULTS: tl.constexpr, BASE: tl.constexpr,
    IN_UNITS: tl.constexpr, IN_VECTOR: tl.constexpr, IN_SIZES: tl.constexpr, IN_DIMS: tl.constexpr,
    IN_MULTS: tl.constexpr, OUT_UNITS: tl.constexpr, OUT_VECTOR: tl.constexpr,
    OUT_SIZES: tl.constexpr, OUT_STRIDES: tl.constexpr, EDGES: tl.constexpr,
    SHAPE: tl.constexpr, PERM: tl.constexpr, BACK_SHAPE: tl.constexpr, BACK_PERM: tl.constexpr,
    WORD_SHAPE: tl.constexpr, WORD_PERM: tl.constexpr, WORD_BACK_SHAPE: tl.constexpr,
    WORD_BACK_PERM: tl.constexpr, MEET: tl.constexpr, MOVES: tl.constexpr, BITS: tl.constexpr,
    PADDED: tl.constexpr, OVERHANG: tl.constexpr, FILL: tl.constexpr, WIDE: tl.constexpr,
    WORD: tl.constexpr, SPLIT: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """One tile: source order in, its digits permuted, storage order out; or BACK.

    Row, part and matrix strides count source vectors, storage steps stored ones, so that the
    compiler sees the alignment of every access. global_scales: as in rows_kernel. SPLIT: row by
    row, the first `half` rows are the first part's and the others the second's; or at -1 the other
    way round.
    """
    left = tl.program_id(0)
    p, h, c = left * 0 + BASE[0], left * 0 + BASE[1], left * 0 + BASE[2]
    at = left.to(tl.int64) * 0
    for d in tl.static_range(len(GRID_DIMS)):
        digit = left % counts[d]
        left = left // counts[d]
        at += digit.to(tl.int64) * outs[d]
        if GRID_DIMS[d] == 0:
            p += digit * GRID_MULTS[d]
        elif GRID_DIMS[d] == 1:
            h += digit * GRID_MULTS[d]
        else:
            c += digit * GRID_MULTS[d]
    matrix = left.to(tl.int64)
    # A layout that permutes bits stores whole 32-bit words, also where it gathers single bytes.
    STORED: tl.constexpr = 4 if len(BITS) > 0 and WORD == 1 else 1
    LANES: tl.constexpr = OUT_VECTOR // STORED
    storage += (matrix * storage_stride + at) * LANES
    above = 0 if SPLIT else h
    source += (
        matrix * strides[0] + p.to(tl.int64) * strides[1] + tl.cast(above, tl.int64) * strides[2]
    ) * IN_VECTOR
    source += c.to(tl.int64) * strides[3]

    unit = tl.arange(0, IN_UNITS)
    ps, hs, cs = tl.zeros_like(unit), tl.zeros_like(unit), tl.zeros_like(unit)
    for d in tl.static_range(len(IN_SIZES)):
        digit = unit % IN_SIZES[d]
        unit = unit // IN_SIZES[d]
        if IN_DIMS[d] == 0:
            ps += digit * IN_MULTS[d]
        elif IN_DIMS[d] == 1:
            hs += digit * IN_MULTS[d]
        else:
            cs += digit * IN_MULTS[d]
    if SPLIT:
        second = (h + hs >= half).to(tl.int32)
        hs += h - second * half
        ps = second if SPLIT == 1 else 1 - second
    known = tl.full((IN_UNITS, 1), True, tl.int1)
    if PADDED or OVERHANG:
        known = ((above + hs < valid[0]) & (c + cs < valid[1]))[:, None]
    if WIDE:
        ps, hs, cs = ps.to(tl.int64), hs.to(tl.int64), cs.to(tl.int64)
    here = source + ((ps * strides[1] + hs * strides[2]) * IN_VECTOR + cs * strides[3])[:, None]
    here += tl.arange(0, IN_VECTOR)[None, :]

    unit = tl.arange(0, OUT_UNITS)
    inside = tl.full((OUT_UNITS, 1), True, tl.int1)
    if OVERHANG:
        for d in tl.static_range(len(EDGES) // 4):
            digit = (unit // EDGES[4 * d]) % EDGES[4 * d + 1] * EDGES[4 * d + 3]
            if EDGES[4 * d + 2] == 1:
                inside &= (h + digit < padded[0])[:, None]
            else:
                inside &= (c + digit < padded[1])[:, None]
    to = tl.zeros_like(unit)
    if WIDE:
        to = to.to(tl.int64)
    for d in tl.static_range(len(OUT_SIZES)):
        digit = unit % OUT_SIZES[d]
        unit = unit // OUT_SIZES[d]
        to += digit * (row_out if OUT_STRIDES[d] == -1 else OUT_STRIDES[d])
    there = storage + (to * LANES)[:, None] + tl.arange(0, LANES)[None, :]

    if BACK:
        y = tl.load(there, mask=inside, other=0)
        if len(BITS) > 0:
            y = _move_bits(y, BITS, True)
            if WORD == 1:
                y = _bytes_of(y, OUT_UNITS, OUT_VECTOR)
        if MEET > 1:
            y = _transpose_bytes(_permute(y, WORD_BACK_SHAPE, WORD_BACK_PERM), MEET, MOVES, True)
        y = _permute(y, BACK_SHAPE, BACK_PERM)
        tl.store(here, tl.reshape(y, (IN_UNITS, IN_VECTOR)), mask=known)
    else:
        x = tl.load(here, mask=known, other=FILL)
        if global_scales is not None:
            x = one_global_scale(x, (p + ps)[:, None], global_scales + 2 * matrix, WORD)
        x = _permute(x, SHAPE, PERM)
        if MEET > 1:
            x = _permute(_transpose_bytes(x, MEET, MOVES, False), WORD_SHAPE, WORD_PERM)
        x = tl.reshape(x, (OUT_UNITS, OUT_VECTOR))
        if len(BITS) > 0:
            if WORD == 1:
                x = _words_of(x, OUT_UNITS, OUT_VECTOR)
            x = _move_bits(x, BITS, False)
        tl.store(there, x, mask=inside)


@triton.jit
def _permute(x, SHAPE: tl.constexpr, PERM: tl.constexpr):
    """The tile by its digits, in another order."""
    x = tl.reshape(x, SHAPE)
    return tl.permute(x, PERM[0], PERM[1], PERM[2], PERM[3], PERM[4], PERM[5], PERM[6], PERM[7])


@triton.jit
def _transpose_bytes(x, MEET: tl.constexpr, MOVES: tl.constexpr, BACK: tl.constexpr):
    """[..., MEET] words of MEET bytes (the last axes of x, flat) -> byte i of word j is byte j of
    word i.

    MOVES happen in between, where word i holds byte i of MEET stored words: before the
    transposition on the way to storage, after it on the way back.
    """
    if MEET == 2:
        a, b = tl.split(tl.reshape(x.to(tl.uint16, bitcast=True), (x.numel // 2, 2)))
        y = tl.join((a & 0xFF) | (b << 8), (a >> 8) | (b & 0xFF00))
    else:
        x = x.to(tl.uint32, bitcast=True)
        even, odd = tl.split(tl.reshape(x, (x.numel // 4, 2, 2)))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        if len(MOVES) > 0 and not BACK:
            w0, w1, w2, w3 = _move_in_bytes(w0, w1, w2, w3, MOVES, False)
        a = (w0 & 0x00FF00FF) | ((w1 << 8) & 0xFF00FF00)
        b = ((w0 >> 8) & 0x00FF00FF) | (w1 & 0xFF00FF00)
        c = (w2 & 0x00FF00FF) | ((w3 << 8) & 0xFF00FF00)
        d = ((w2 >> 8) & 0x00FF00FF) | (w3 & 0xFF00FF00)
        w0, w1 = (a & 0xFFFF) | (c << 16), (b & 0xFFFF) | (d << 16)
        w2, w3 = (a >> 16) | (c & 0xFFFF0000), (b >> 16) | (d & 0xFFFF0000)
        if len(MOVES) > 0 and BACK:
            w0, w1, w2, w3 = _move_in_bytes(w0, w1, w2, w3, MOVES, True)
        y = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return y


@triton.jit
def _move_in_bytes(w0, w1, w2, w3, MOVES: tl.constexpr, BACK: tl.constexpr):
    """Bits between and inside the bytes of four words at a time; each move is one shift and one
    mask."""
    v0, v1, v2, v3 = tl.zeros_like(w0), tl.zeros_like(w0), tl.zeros_like(w0), tl.zeros_like(w0)
    for i in tl.static_range(len(MOVES) // 4):
        byte = MOVES[4 * i + 1] if not BACK else MOVES[4 * i]
        w = w0 if byte == 0 else (w1 if byte == 1 else (w2 if byte == 2 else w3))
        moved = _move(w, MOVES[4 * i + 2], MOVES[4 * i + 3], BACK)
        to = MOVES[4 * i] if not BACK else MOVES[4 * i + 1]
        if to == 0:
            v0 |= moved
        elif to == 1:
            v1 |= moved
        elif to == 2:
            v2 |= moved
        else:
            v3 |= moved
    return v0, v1, v2, v3


@triton.jit
def _move(x, DISTANCE: tl.constexpr, MASK: tl.constexpr, BACK: tl.constexpr):
    """The bits of x that arrive at MASK when moved up by DISTANCE (down if negative); or those
    back."""
    if BACK:
        x = x & MASK
        return x >> DISTANCE if DISTANCE > 0 else x << -DISTANCE
    x = x << DISTANCE if DISTANCE > 0 else x >> -DISTANCE
    return x & MASK


@triton.jit
def _words_of(x, UNITS: tl.constexpr, VECTOR: tl.constexpr):
    """uint8 [UNITS, VECTOR] -> little-endian 32-bit words [UNITS, VECTOR / 4]."""
    even, odd = tl.split(tl.reshape(x, (UNITS, VECTOR // 4, 2, 2)))
    b0, b2 = tl.split(even)
    b1, b3 = tl.split(odd)
    low = b0.to(tl.uint32) | (b1.to(tl.uint32) << 8)
    return low | (b2.to(tl.uint32) << 16) | (b3.to(tl.uint32) << 24)


@triton.jit
def _bytes_of(x, UNITS: tl.constexpr, VECTOR: tl.constexpr):
    """Little-endian 32-bit words [UNITS, VECTOR / 4] -> uint8 [UNITS, VECTOR]."""
    even = tl.join(x, x >> 16)
    odd = tl.join(x >> 8, x >> 24)
    return tl.reshape(tl.join(even, odd).to(tl.uint8), (UNITS, VECTOR))


@triton.jit
def _move_bits(x, BITS: tl.constexpr, BACK: tl.constexpr):
    """Each (distance, mask) of BITS moves its bits of every word, or moves them back."""
    x = x.to(tl.uint32, bitcast=True)
    y = tl.zeros_like(x)
    for i in tl.static_range(len(BITS) // 2):
        y |= _move(x, BITS[2 * i], BITS[2 * i + 1], BACK)
    return y


@triton.jit
def swap_kernel(
    x, half, blocks, UNITS: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Both halves of every matrix change places, each tile pair in registers; x is [matrices, 2,
    half].

    WIDE: both halves pass 2**31 units. In 32 bits the compiler loads the first half first, which
    is 10 % faster on an H200 than the other order.
    """
    pid = tl.program_id(0)
    block = (pid % blocks).to(tl.int64) if WIDE else pid % blocks
    unit = block * UNITS + tl.arange(0, UNITS)
    pair = 2 * tl.cast(half, tl.int64) if WIDE else 2 * half
    first = x + (pid // blocks).to(tl.int64) * pair * VECTOR
    first += (unit.to(tl.int64) * VECTOR)[:, None] + tl.arange(0, VECTOR)[None, :]
    second = first + tl.cast(half, tl.int64) * VECTOR  # a size of 1 is a constant, without .to
    inside = (unit < half)[:, None]
    gate, up = tl.load(first, mask=inside), tl.load(second, mask=inside)
    tl.store(first, up, mask=inside)
    tl.store(second, gate, mask=inside)
