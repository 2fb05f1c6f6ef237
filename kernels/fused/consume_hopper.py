"""Hopper's reader: twiddled FP4 values and their scales to bf16 in registers, then wgmma.

Hopper has no FP4 matrix unit, so the weight is the left operand, `y.T = w @ x.T`: wgmma takes its
left operand from registers, and the value layout is exactly the register order of that operand, so
that untwiddled bytes go to the matrix unit without passing shared memory. Storage of w is
`catalog.hopper_value(3)`, of its scales `catalog.hopper_scale(num_warps)` for the kernel's own
num_warps.

A 32-bit word holds 8 codes (bytes 0..3, low nibble first). Codes 0..5 are two bf16 lanes after one
shift and one mask a pair: sign, two exponent bits and the mantissa bit land in bits 15 and 8..6 of
each lane, which is the value times 2^-126. Codes 6 and 7 take three shifts (catalog.HOPPER_TWIDDLE;
the inverse of triton_kernels hopper_value.py's `_pack_bits`).

ASM: packed bf16 arithmetic in PTX, what the backend runs. Without it the same numbers come from
plain fp32 operations, which the interpreter can run. They differ in scale byte 0: the PTX form, as
the backend, reads 0.0 where e8m0 says 2^-127; byte 255 is Inf there and NaN here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.fused.consume_kernels import e8m0, permute

_LANES = 0x81C081C0 - (1 << 32)  # sign, exponent, mantissa of two bf16 lanes, as int32
_SIGNS, _TOP, _LOW = 0x80008000 - (1 << 32), 0x01800180, 0x00400040

LANES, SIGNS, TOP, LOW = (tl.constexpr(v) for v in (_LANES, _SIGNS, _TOP, _LOW))

# e2m1 read as bf16 bits is 2^126 too small; 0x7E80 is bf16's 2^126.
_UNTWIDDLE = """{
    .reg .b32 t, u, v, bias;
    mov.b32 bias, 0x7e807e80;
    and.b32 t, $4, 0x81c081c0;
    mul.bf16x2 $0, t, bias;
    shl.b32 t, $4, 3;
    and.b32 t, t, 0x81c081c0;
    mul.bf16x2 $1, t, bias;
    shl.b32 t, $4, 6;
    and.b32 t, t, 0x81c081c0;
    mul.bf16x2 $2, t, bias;
    shl.b32 t, $4, 1;
    and.b32 t, t, 0x80008000;
    shr.b32 u, $4, 3;
    and.b32 u, u, 0x01800180;
    shr.b32 v, $4, 7;
    and.b32 v, v, 0x00400040;
    or.b32 t, t, u;
    or.b32 t, t, v;
    mul.bf16x2 $3, t, bias;
}"""
# Four scale bytes to four bf16: byte b becomes exponent b, mantissa 0.
_SCALES = """{
    prmt.b32 $0, $2, 0, 0x5140;
    shl.b32 $0, $0, 7;
    prmt.b32 $1, $2, 0, 0x7362;
    shl.b32 $1, $1, 7;
}"""
UNTWIDDLE, SCALES, MULTIPLY = (
    tl.constexpr(text) for text in (_UNTWIDDLE, _SCALES, "mul.bf16x2 $0, $1, $2;")
)


@triton.jit
def _values_asm(raw, ROWS: tl.constexpr, COLS: tl.constexpr):
    """[ROWS, COLS] storage bytes -> bf16 [ROWS, COLS * 2], codes in byte order."""
    first, second = tl.inline_asm_elementwise(
        UNTWIDDLE, "=r,=r,=r,=r,r", [raw], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )
    both = tl.join(first, second).reshape(ROWS, COLS // 4, 4, 2)  # codes 0..3 | 4..7 of each word
    return both.trans(0, 1, 3, 2).reshape(ROWS, COLS * 2)


@triton.jit
def _values(raw, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The same from int32 words [ROWS, COLS / 4], in plain operations; fp32."""
    pair0, pair1, pair2 = raw & LANES, (raw << 3) & LANES, (raw << 6) & LANES
    pair3 = ((raw << 1) & SIGNS) | ((raw >> 3) & TOP) | ((raw >> 7) & LOW)
    pairs = tl.join(tl.join(pair0, pair2), tl.join(pair1, pair3)).reshape(ROWS, COLS)
    codes = tl.join(pairs << 16, pairs & -65536).reshape(ROWS, COLS * 2)
    return codes.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def _weight_block(
    w_at, w_live, s_at, s_live, groups,
    W_SHAPE: tl.constexpr, W_PERM: tl.constexpr, W_FOLD: tl.constexpr,
    S_SHAPE: tl.constexpr, S_PERM: tl.constexpr, S_RANK: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, TAIL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """bf16 (without ASM fp32) [BN, BK] from one block of value storage and one of scale storage."""
    ROWS: tl.constexpr = BN // W_FOLD
    COLS: tl.constexpr = BK // 2 * W_FOLD
    if TAIL:
        raw = tl.load(w_at, mask=w_live, other=0)
        held = tl.load(s_at, mask=s_live, other=0)
        scale = permute(held.reshape(S_SHAPE), S_PERM, S_RANK).reshape(BN, BK // 32)
        scale = tl.where(tl.arange(0, BK // 32)[None, :] < groups, scale, tl.zeros_like(scale))
    else:
        raw = tl.load(w_at)
        scale = permute(tl.load(s_at).reshape(S_SHAPE), S_PERM, S_RANK).reshape(BN, BK // 32)
    # One branch each and no early return: triton compiles what follows a returning static branch
    # too.
    if ASM:
        value = permute(_values_asm(raw, ROWS, COLS).reshape(W_SHAPE), W_PERM, 10).reshape(BN, BK)
        factor = tl.inline_asm_elementwise(
            SCALES, "=r,=r,r", [scale], dtype=tl.bfloat16, is_pure=True, pack=4
        )
        factor = factor[:, :, None].broadcast_to(BN, BK // 32, 32).reshape(BN, BK)
        weight = tl.inline_asm_elementwise(
            MULTIPLY, "=r,r,r", [value, factor], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        value = permute(_values(raw, ROWS, COLS).reshape(W_SHAPE), W_PERM, 10).reshape(BN, BK)
        factor = e8m0(scale.to(tl.int32))[:, :, None]
        weight = value * factor.broadcast_to(BN, BK // 32, 32).reshape(BN, BK)
    return weight


@triton.jit
def hopper_matmul_kernel(
    x_ptr, w_ptr, s_ptr, y_ptr, M, N, K, w_rows, s_rows, x_row, w_row, s_row,
    W_SHAPE: tl.constexpr, W_PERM: tl.constexpr, W_FOLD: tl.constexpr,
    S_SHAPE: tl.constexpr, S_PERM: tl.constexpr, S_RANK: tl.constexpr, S_FOLD: tl.constexpr,
    TAIL: tl.constexpr, ASM: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[e] = x[e] @ w[e].T for bf16 x. w_row, s_row: storage bytes a row; w_rows, s_rows: rows."""
    pid_n, pid_m, expert = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    KS: tl.constexpr = BK // 32
    WORD: tl.constexpr = 1 if ASM else 4  # bytes a loaded value element holds
    W_COLS: tl.constexpr = BK // 2 * W_FOLD // WORD
    offs_m, offs_n = pid_m * BM + tl.arange(0, BM), pid_n * BN + tl.arange(0, BN)
    offs_k, w_col, s_col = tl.arange(0, BK), tl.arange(0, W_COLS), tl.arange(0, KS * S_FOLD)
    w_of_n = (pid_n * (BN // W_FOLD) + tl.arange(0, BN // W_FOLD)) % w_rows
    s_of_n = (pid_n * (BN // S_FOLD) + tl.arange(0, BN // S_FOLD)) % s_rows
    row_m = offs_m % M
    x_at = x_ptr + expert * M * x_row + row_m[:, None] * x_row + offs_k[None, :]
    w_base = w_ptr + expert * w_rows * w_row
    if not ASM:
        w_base = w_base.to(tl.pointer_type(tl.int32))
    w_at = w_base + w_of_n[:, None] * (w_row // WORD) + w_col[None, :]
    s_at = s_ptr + expert * s_rows * s_row + s_of_n[:, None] * s_row + s_col[None, :]

    acc = tl.zeros((BN, BM), dtype=tl.float32)
    full = K // BK * BK
    for k in range(0, full, BK):
        w = _weight_block(
            w_at + k // 2 * W_FOLD // WORD, None, s_at + k // 32 * S_FOLD, None, KS,
            W_SHAPE, W_PERM, W_FOLD, S_SHAPE, S_PERM, S_RANK, BN, BK, False, ASM,
        )  # fmt: skip
        x = tl.load(x_at + k)
        if ASM:
            acc = tl.dot(w, x.T, acc)
        else:
            acc = tl.dot(w, x.T.to(tl.float32), acc, input_precision="ieee")
    if TAIL:
        w_live = (full // 2 * W_FOLD // WORD + w_col)[None, :] < w_row // WORD
        s_live = (full // 32 * S_FOLD + s_col)[None, :] < s_row
        w = _weight_block(
            w_at + full // 2 * W_FOLD // WORD, w_live, s_at + full // 32 * S_FOLD, s_live,
            (K - full) // 32,
            W_SHAPE, W_PERM, W_FOLD, S_SHAPE, S_PERM, S_RANK, BN, BK, True, ASM,
        )  # fmt: skip
        x = tl.load(x_at + full, mask=offs_k[None, :] < K - full, other=0)
        if ASM:
            acc = tl.dot(w, x.T, acc)
        else:
            acc = tl.dot(w, x.T.to(tl.float32), acc, input_precision="ieee")
    live = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    y_at = y_ptr + expert * M * N + offs_m[:, None] * N + offs_n[None, :]
    tl.store(y_at, acc.T.to(y_ptr.dtype.element_ty), mask=live)
