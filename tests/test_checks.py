"""Each check of the ladder finds the fault that it is there for, and says where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from harness.check import checks, expected, index_checks
from harness.run import small
from harness.run.job import Job, Made, Result
from kernels import formats
from kernels.catalog import LAYOUTS
from kernels.layout import Layout

T = torch.Tensor


def made(layout: Layout, n: int = 130, k: int = 5, storage: T | None = None) -> Made:
    # mixed positions: plain ones repeat every 256 bytes, which can be a row
    x = (torch.arange(2 * n * k) * 40503 >> 7).to(torch.uint8).view(2, n, k) | 1
    stored = layout.forward(x).flatten(1) if storage is None else storage
    return Made(stored, layout, n, k, (n, k), lambda: x, lambda m, c: x[:, m, c])


def result(one: Made) -> Result:
    return Result({"w": one.storage}, made={"w": one})


RIGHT = made(LAYOUTS["block_scale_128x4"])


def spoilt(position: int) -> Made:
    storage = RIGHT.storage.clone()
    storage[1, position] ^= 0x80
    return replace(RIGHT, storage=storage)


@pytest.mark.parametrize(
    "check",
    [checks.inverse, checks.by_formula, checks.pad_fill, checks.pad_count, index_checks.bijection,
     index_checks.mutated],
)  # fmt: skip
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_right_layout_passes(name: str, check: Callable[[Result], str | None]) -> None:
    assert checks.verdict(lambda: check(result(made(LAYOUTS[name])))).startswith("pass")


def test_a_flipped_data_byte_is_found_and_placed() -> None:
    """Element (129, 4) of expert 1 is at 128x4 offset (1 * 2 + 1) * 512 + 16 of its storage."""
    wrong = result(spoilt(3 * 512 + 16))
    for check in (checks.inverse, checks.by_formula):
        said = checks.verdict(lambda check=check: check(wrong))
        assert said.startswith("fail: w")
        assert "1 of" in said
        assert "first at [1, 129, 4]" in said
        assert "0x" in said
        assert "instead of 0x" in said
    assert checks.verdict(lambda: checks.pad_fill(wrong)) == "pass"


def test_a_dirty_pad_byte_is_found() -> None:
    wrong = result(spoilt(3 * 512 + 16 + 3))  # row 129, column 7: beyond both
    assert checks.verdict(lambda: checks.inverse(wrong)) == "pass"
    for check in (checks.pad_fill, checks.pad_count):
        assert checks.verdict(lambda check=check: check(wrong)).startswith("fail: w")


def test_padding_inside_twiddled_words_is_looked_at() -> None:
    layout = LAYOUTS["hopper_value_v3"]
    right = made(layout, 17, 33)
    x = torch.zeros(2, *layout.padded(17, 33), dtype=torch.uint8)
    x[:, :17, :33] = right.source()
    x[1, 20, 3] = 7  # padding
    wrong = replace(right, storage=layout.forward(x).flatten(1))
    assert checks.verdict(lambda: checks.inverse(result(wrong))) == "pass"
    assert checks.verdict(lambda: checks.pad_fill(result(wrong))).startswith("fail")


def test_a_catalog_that_is_wrong_everywhere_alike_fails_by_formula_only() -> None:
    layout = replace(
        LAYOUTS["block_scale_128x4"], pattern="(rn no ni) (rk kk) -> (rn rk) (no ni kk)"
    )
    wrong = result(made(layout))
    assert checks.verdict(lambda: checks.inverse(wrong)) == "pass"
    said = checks.verdict(lambda: checks.by_formula(wrong))
    assert "w in block_scale_128x4: " in said
    assert "first at [0, 1, 0]" in said


def test_a_storage_of_another_size_is_said() -> None:
    layout = replace(LAYOUTS["blackwell_scale"], align=(128, 4))
    said = checks.verdict(lambda: checks.by_formula(result(made(layout, 130, 4))))
    assert "the vendor's form of 130 x 4 holds 256 x 8" in said


def test_large_matrices_are_sampled_and_the_verdict_says_so() -> None:
    layout = LAYOUTS["trtllm_shuffle_32"]
    said = checks.verdict(lambda: checks.by_formula(result(made(layout, 4096, 256))))
    assert said == "pass (24 rows and 24 columns of each large matrix)"
    swapped = replace(layout, pattern="(r a b) k -> (r a b) k")
    said = checks.verdict(lambda: checks.by_formula(result(made(swapped, 4096, 256))))
    assert said.startswith("fail")


def test_numbers_are_compared_in_bits() -> None:
    zero = torch.zeros(3)
    with pytest.raises(checks.Fails, match=r"1 of 3 elements differ, first at \[2\]: 0x80000000"):
        checks.same("x", torch.tensor([0.0, 0.0, -0.0]), zero)
    with pytest.raises(checks.Fails, match="shape"):
        checks.same("x", zero, zero[:2])
    nan = torch.tensor([torch.nan])
    checks.same("x", nan, nan.clone())


def job(function: Callable[[T], T], promise: str = "new", x: T | None = None) -> Job:
    """A job of one tensor in the strided layout."""
    given = torch.arange(64, dtype=torch.uint8).view(1, 8, 8) if x is None else x

    def run() -> Result:
        out = function(given)
        return Result({"w": out}, inputs={"w": given})

    again = lambda inputs: job(function, promise, inputs["w"])
    return Job({"w": given}, run, promise, again, run, lambda result: given.nbytes)


def test_strides_and_aliases_are_held_to_the_promise() -> None:
    good = job(lambda x: x.clone())
    assert checks.verdict(lambda: checks.strides(good, good.run())) == "pass"
    shared = job(lambda x: x)
    assert "shares memory with input w" in checks.verdict(
        lambda: checks.strides(shared, shared.run())
    )
    wide = job(lambda x: x.clone().mT)
    assert "not contiguous" in checks.verdict(lambda: checks.strides(wide, wide.run()))
    moved = job(lambda x: x.clone(), "in_place")
    assert "other memory" in checks.verdict(lambda: checks.strides(moved, moved.run()))


def test_a_view_that_is_a_copy_is_found() -> None:
    layout = LAYOUTS["cutedsl_mma_view"]
    one = made(layout)
    view = layout.consumer_view(one.storage.view(2, *layout.storage_shape(130, 5)), 130, 5)
    fine = Result({"w": one.storage}, made={"w": one}, views={"w": view})
    some = job(lambda x: x.clone())
    assert checks.verdict(lambda: checks.strides(some, fine)) == "pass"
    copied = replace(fine, views={"w": view.clone()})
    assert "is a copy" in checks.verdict(lambda: checks.strides(some, copied))
    turned = replace(fine, views={"w": view.transpose(0, 1)})
    assert "the consumer reads" in checks.verdict(lambda: checks.strides(some, turned))


def test_written_inputs_are_found() -> None:
    x = torch.zeros(8, dtype=torch.uint8)
    before = checks.digests({"x": x})
    assert checks.verdict(lambda: checks.unchanged(before, {"x": x})) == "pass"
    x[3] = 1
    assert "input x [8] was written to" in checks.verdict(
        lambda: checks.unchanged(before, {"x": x})
    )


def test_reading_beyond_an_input_is_found() -> None:
    beyond = lambda x: torch.as_strided(x, (1, 8, 8), (64, 8, 1), x.storage_offset()).clone()
    one = job(beyond)
    assert checks.verdict(lambda: small.poisoned_source(one, one.run())) == "pass"

    def too_far(x: T) -> T:
        size = x.untyped_storage().nbytes()
        at = min(x.storage_offset() + 8, size - 64)
        return torch.as_strided(x, (1, 8, 8), (64, 8, 1), at).clone()

    one = job(too_far)
    assert checks.verdict(lambda: small.poisoned_source(one, one.run())).startswith("fail")


def test_writing_beyond_an_input_is_found() -> None:
    def scribbles(x: T) -> T:
        if x.untyped_storage().nbytes() > x.storage_offset() + 64:
            torch.as_strided(x, (1,), (1,), x.storage_offset() + 64).fill_(0)
        return x.clone()

    one = job(scribbles)
    said = checks.verdict(lambda: small.poisoned_source(one, one.run()))
    assert "the bytes around w" in said


def test_memory_that_is_not_written_is_found() -> None:
    def partly(x: T) -> T:
        out = torch.empty_like(x)
        out[:, :7] = x[:, :7]
        return out

    one = job(partly)
    first = Result({"w": torch.zeros(1, 8, 8, dtype=torch.uint8)})
    first.tensors["w"][:, :7] = torch.arange(56, dtype=torch.uint8).view(7, 8)
    said = checks.verdict(lambda: small.written_whole(one, first))
    assert "8 of 64 elements differ, first at [0, 7, 0]: 0xff" in said.replace(
        "0x00 instead of ", ""
    )
    whole = job(lambda x: x.clone())
    assert checks.verdict(lambda: small.written_whole(whole, whole.run())) == "pass"
    assert torch.get_deterministic_debug_mode() == 0  # the switch was put back


def test_the_small_layer_keeps_remainders() -> None:
    for hidden, inner, tp in ((2880, 2880, 1), (7168, 2048, 8), (4096, 14336, 4), (1504, 704, 8)):
        h, i = small.sizes(hidden, inner, tp)
        assert (h - hidden) % 512 == 0
        assert (i - inner) % (256 * tp) == 0
        assert h <= 1024
        assert i <= 512 * tp


def test_expected_values_are_those_of_the_formats() -> None:
    """Two independent decoders and quantizers agree on every byte and on random blocks."""
    every = torch.arange(256, dtype=torch.uint8)
    ours = formats.decode_e8m0(every)
    assert torch.equal(expected.e8m0(every)[:255].float(), ours[:255])
    assert torch.equal(expected.e4m3(every).float().nan_to_num(9e9),
                       formats.decode_e4m3(every).nan_to_num(9e9))  # fmt: skip
    assert torch.equal(expected.codes(every), formats.unpack_e2m1(every))
    x = (torch.randn(1, 64, 96) * torch.rand(1, 64, 1).mul(20).exp()).to(torch.bfloat16)
    from kernels.reference.quantize import downcast_to_mxfp

    packed, scale, *_ = downcast_to_mxfp(x, 2)
    code, byte = expected.mxfp4(x)
    assert torch.equal(byte, scale)
    assert torch.equal(code, formats.unpack_e2m1(packed))
