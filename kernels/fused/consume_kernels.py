"""Readers that need no particular architecture: a `tl.dot_scaled` tile matmul, and dequantize
alone.

The constexpr tables (SHAPE, PERM, DIGITS, ROWS, ...) come from a layout's digits; `consume.py`
makes them and launches these kernels, and says what each reader stands for.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def source_index(offset, DIGITS: tl.constexpr, COUNT: tl.constexpr, DIM: tl.constexpr):
    """Flat storage offset -> index along n (DIM 0) or k (DIM 1). COUNT: how many digits (before
    triton 3.7 a constexpr tuple has no len)."""
    index = offset * 0
    for i in tl.static_range(COUNT):
        if DIGITS[i][1] == DIM:
            digit = (offset // DIGITS[i][3]) % DIGITS[i][0]
            if DIGITS[i][4]:
                digit = DIGITS[i][0] - 1 - digit
            index += digit * DIGITS[i][2]
    return index


@triton.jit
def storage_offset(n, k, DIGITS: tl.constexpr, COUNT: tl.constexpr):
    """(n, k) -> flat storage offset."""
    offset = n * 0 + k * 0
    for i in tl.static_range(COUNT):
        index = n if DIGITS[i][1] == 0 else k
        digit = (index // DIGITS[i][2]) % DIGITS[i][0]
        if DIGITS[i][4]:
            digit = DIGITS[i][0] - 1 - digit
        offset += digit * DIGITS[i][3]
    return offset


@triton.jit
def permute(x, P: tl.constexpr, RANK: tl.constexpr):
    """x.permute(P): spelled out by rank, since before triton 3.7 a constexpr tuple is no
    permutation."""
    tl.static_assert(RANK == 2 or (RANK >= 5 and RANK <= 7) or RANK == 10, "add this rank")
    if RANK == 2:
        y = tl.permute(x, P[0], P[1])
    elif RANK == 5:
        y = tl.permute(x, P[0], P[1], P[2], P[3], P[4])
    elif RANK == 6:
        y = tl.permute(x, P[0], P[1], P[2], P[3], P[4], P[5])
    elif RANK == 7:
        y = tl.permute(x, P[0], P[1], P[2], P[3], P[4], P[5], P[6])
    else:
        y = tl.permute(x, P[0], P[1], P[2], P[3], P[4], P[5], P[6], P[7], P[8], P[9])
    return y


@triton.jit
def e8m0(byte):
    """int32 scale byte -> fp32 2^(byte-127): byte 0 is the subnormal 2^-127, byte 255 NaN."""
    bits = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e4m3(byte):
    """int32 scale byte -> fp32: exponent bias 7, exponent 0 subnormal (steps of 2^-9), 0x7F NaN."""
    exponent, mantissa = (byte >> 3) & 0xF, byte & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    scale = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
    return tl.where(byte & 0x7F == 0x7F, float("nan"), tl.where(byte > 127, -scale, scale))


@triton.jit
def e2m1(code):
    """int32 code 0..15 -> fp32: sign, two exponent bits with bias 1, one mantissa bit."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    normal = (((exponent + 126) << 23) | (mantissa << 22)).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.5, normal)
    return tl.where(code > 7, -value, value)


@triton.jit
def _decode(packed, scale, ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr):
    """Packed codes [ROWS, COLS / 2] and scale bytes [ROWS, COLS / GROUP] -> fp32 [ROWS, COLS]."""
    code = packed.to(tl.int32)
    value = tl.join(e2m1(code & 0xF), e2m1(code >> 4)).reshape(ROWS, COLS)
    factor = e8m0(scale.to(tl.int32)) if GROUP == 32 else e4m3(scale.to(tl.int32))
    factor = factor[:, :, None].broadcast_to(ROWS, COLS // GROUP, GROUP).reshape(ROWS, COLS)
    return value * factor


@triton.jit
def _scale_block(
    ptr, row, cols, k_group, groups, limit,
    SHAPE: tl.constexpr, PERM: tl.constexpr, RANK: tl.constexpr, FOLD: tl.constexpr,
    BN: tl.constexpr, KS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """[BN, KS] scales whose first group is k_group: contiguous pieces, then un-swizzled."""
    at = ptr + row[:, None] + (k_group * FOLD + cols)[None, :]
    if TAIL:
        raw = tl.load(at, mask=(k_group * FOLD + cols)[None, :] < limit, other=0)
        scale = permute(raw.reshape(SHAPE), PERM, RANK).reshape(BN, KS)
        live = (k_group + tl.arange(0, KS))[None, :] < groups
        scale = tl.where(live, scale, tl.zeros_like(scale))
    else:
        scale = permute(tl.load(at).reshape(SHAPE), PERM, RANK).reshape(BN, KS)
    return scale


@triton.jit
def _dot(
    x, xs, w, ws, acc, X_FORMAT: tl.constexpr, GROUP: tl.constexpr, PLAIN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """acc + x @ w.T for one block. PLAIN: decoded to fp32 first, the numbers without a scaled
    unit."""
    # One branch each and no early return: triton compiles what follows a returning static branch
    # too.
    if PLAIN:
        weight = _decode(w, ws, BN, BK, GROUP).T
        if X_FORMAT == "e2m1":
            acc = tl.dot(_decode(x, xs, BM, BK, GROUP), weight, acc, input_precision="ieee")
        else:
            acc = tl.dot(x.to(tl.float32), weight, acc, input_precision="ieee")
    else:
        if GROUP == 16:
            ws = ws.to(tl.float8e4nv, bitcast=True)
            xs = xs.to(tl.float8e4nv, bitcast=True)
        if X_FORMAT == "bf16":
            acc = tl.dot_scaled(x, None, "bf16", w.T, ws, "e2m1", acc, fast_math=True)
        else:
            acc = tl.dot_scaled(x, xs, X_FORMAT, w.T, ws, "e2m1", acc, fast_math=True)
    return acc


@triton.jit
def scaled_matmul_kernel(
    x_ptr, xs_ptr, w_ptr, s_ptr, y_ptr,
    M, N, K, w_rows, s_rows, x_row, xs_row, w_row, s_row,
    SHAPE: tl.constexpr, PERM: tl.constexpr, RANK: tl.constexpr, FOLD: tl.constexpr,
    ROWS: tl.constexpr, N_ROWS: tl.constexpr, X_FORMAT: tl.constexpr, GROUP: tl.constexpr,
    TAIL: tl.constexpr, PLAIN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[e] = x[e] @ w[e].T. x_row, xs_row, w_row, s_row: bytes or elements from a row to the next.

    X_FORMAT: bf16 (no xs), e4m3 or e2m1 (xs [E, M, K/GROUP], linear). w_rows, s_rows: storage rows.
    ROWS: where storage row r of w belongs (`row_table`); the epilogue puts it there. TAIL: BK does
    not divide K. PLAIN: fp32 arithmetic, for the interpreter and to check `dot_scaled` against.
    """
    pid_n, pid_m, expert = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    KS: tl.constexpr = BK // GROUP
    X_PACK: tl.constexpr = 2 if X_FORMAT == "e2m1" else 1
    offs_m = pid_m * BM + tl.arange(0, BM)
    offs_n = pid_n * BN + tl.arange(0, BN)
    offs_kx = tl.arange(0, BK // X_PACK)
    offs_kw = tl.arange(0, BK // 2)
    cols = tl.arange(0, KS * FOLD)
    # A row past the end reads another row of the tensor instead of being masked: its result is not
    # stored.
    row_m = offs_m % M
    s_at = (pid_n * (BN // FOLD) + tl.arange(0, BN // FOLD)) % s_rows * s_row
    s_base = s_ptr + expert * s_rows * s_row
    x_at = x_ptr + expert * M * x_row + row_m[:, None] * x_row + offs_kx[None, :]
    w_at = w_ptr + expert * w_rows * w_row + (offs_n % w_rows)[:, None] * w_row + offs_kw[None, :]
    xs_at = xs_ptr + expert * M * xs_row + row_m[:, None] * xs_row + tl.arange(0, KS)[None, :]

    acc = tl.zeros((BM, BN), dtype=tl.float32)
    full = K // BK * BK
    for k in range(0, full, BK):
        x = tl.load(x_at + k // X_PACK)
        w = tl.load(w_at + k // 2)
        ws = _scale_block(
            s_base,
            s_at,
            cols,
            k // GROUP,
            K // GROUP,
            s_row,
            SHAPE,
            PERM,
            RANK,
            FOLD,
            BN,
            KS,
            False,
        )
        xs = ws
        if X_FORMAT != "bf16":
            xs = tl.load(xs_at + k // GROUP)
        acc = _dot(x, xs, w, ws, acc, X_FORMAT, GROUP, PLAIN, BM, BN, BK)
    if TAIL:
        left = K - full
        x = tl.load(x_at + full // X_PACK, mask=offs_kx[None, :] < left // X_PACK, other=0)
        w = tl.load(w_at + full // 2, mask=offs_kw[None, :] < left // 2, other=0)
        ws = _scale_block(
            s_base,
            s_at,
            cols,
            full // GROUP,
            K // GROUP,
            s_row,
            SHAPE,
            PERM,
            RANK,
            FOLD,
            BN,
            KS,
            True,
        )
        xs = ws
        if X_FORMAT != "bf16":
            xs = tl.load(
                xs_at + full // GROUP, mask=tl.arange(0, KS)[None, :] < left // GROUP, other=0
            )
        acc = _dot(x, xs, w, ws, acc, X_FORMAT, GROUP, PLAIN, BM, BN, BK)

    out_n = offs_n
    if N_ROWS > 0:
        out_n = source_index(offs_n, ROWS, N_ROWS, 0)
    live = (offs_m < M)[:, None] & ((offs_n < w_rows) & (out_n < N))[None, :]
    y_at = y_ptr + expert * M * N + offs_m[:, None] * N + out_n[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=live)


@triton.jit
def dequantize_kernel(
    w_ptr, s_ptr, y_ptr, N, K, w_bytes, s_bytes,
    DIGITS: tl.constexpr, N_DIGITS: tl.constexpr, SCALE_DIGITS: tl.constexpr,
    N_SCALE_DIGITS: tl.constexpr, BITS: tl.constexpr, TWIDDLED: tl.constexpr,
    E8M0: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y [E, N, K] fp32 from storage: each program reads BLOCK 32-bit words of one expert in storage
    order.

    BITS: where source bit b of a word went, if TWIDDLED. Exact for every code and scale byte.
    """
    expert = tl.program_id(1).to(tl.int64)
    word_at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = w_ptr.to(tl.pointer_type(tl.int32)) + expert * (w_bytes // 4)
    word = tl.load(words + word_at, mask=word_at < w_bytes // 4, other=0)
    for nibble in tl.static_range(8):
        if TWIDDLED:
            code = word * 0
            for t in tl.static_range(4):
                code |= ((word >> BITS[4 * nibble + t]) & 1) << t
        else:
            code = (word >> (4 * nibble)) & 0xF
        offset = word_at * 4 + nibble // 2
        n = source_index(offset, DIGITS, N_DIGITS, 0)
        k = source_index(offset, DIGITS, N_DIGITS, 1) * 2 + nibble % 2
        live = (n < N) & (k < K) & (word_at < w_bytes // 4)
        byte = tl.load(
            s_ptr + expert * s_bytes + storage_offset(n, k // GROUP, SCALE_DIGITS, N_SCALE_DIGITS),
            mask=live,
            other=0,
        ).to(tl.int32)
        scale = e8m0(byte) if E8M0 else e4m3(byte)
        value = e2m1(code)
        tl.store(y_ptr + expert * N * K + n.to(tl.int64) * K + k, value * scale, mask=live)
