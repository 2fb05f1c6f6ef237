"""CPU times of the reference routines by pytest-benchmark; `harness gate run=FILE.json` reads them.

Each benchmark says its cell and its useful bytes, and runs with a warm cache on two experts of
gpt-oss-120b (`harness.gate.ab_suite`). That the routine is right the test suite says; here two
calls have to agree before one is timed.
"""

import pytest
import torch
import triton

import kernels
from harness import rows
from harness.gate import ab_suite
from harness.measure import timing

EXPERTS = 2


@pytest.mark.parametrize("case", ab_suite.SUITE)
def test_reference(benchmark, case):
    make = ab_suite.Inputs(torch.device("cpu"), EXPERTS)
    work = ab_suite.build(case, lambda name: kernels.resolve(name, "reference"), make)
    first, second = ([t.clone() for t in ab_suite.tensors(work.fn())] for _ in range(2))
    if case == "reorder_w1w3_to_w3w1":  # its own inverse: twice is what it was
        second = [t.clone() for t in ab_suite.tensors(work.fn())]
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(first, second, strict=True)
    )
    cell = dict.fromkeys(rows.CELL) | {
        "hw": "cpu", "model": "gpt_oss_120b", "path": case, "tp_size": 1, "tp_rank": 0,
        "ep_size": 1, "experts": EXPERTS, "impl": "reference", "env": "current", "size": "ci",
        "source": "synthetic", "seed": 0,
    }  # fmt: skip
    benchmark.extra_info.update(
        cell=cell, useful_bytes=work.useful_bytes, cache="warm", torch=torch.__version__,
        device=timing.device_name("cpu"), triton=triton.__version__, checks={"repeatable": "pass"},
    )  # fmt: skip
    benchmark.pedantic(work.fn, rounds=20, warmup_rounds=3)
