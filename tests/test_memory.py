"""Measured memory: exact on known calls, and against the resident set that the kernel reports."""

import re
from pathlib import Path

import pytest
import torch

from harness.measure import memory

MIB = 2**20


def test_output_scratch_and_peak_of_a_known_call():
    def call():
        scratch = torch.zeros(4 * MIB, dtype=torch.uint8)
        out = torch.zeros(MIB, dtype=torch.uint8)
        out[0] = scratch[0]
        return out

    found = memory.measure(call, "cpu")
    assert found["output_bytes"] == MIB
    assert 5 * MIB <= found["peak_extra_bytes"] < 5 * MIB + 4096
    assert found["scratch_bytes"] == found["peak_extra_bytes"] - MIB
    assert found["required_over_peak"] == pytest.approx(0.2, abs=1e-3)
    assert found["launches"] is None


def test_in_place_and_views_take_nothing():
    x = torch.zeros(MIB, dtype=torch.uint8)
    assert memory.measure(lambda: x.fill_(3), "cpu")["peak_extra_bytes"] == 0
    found = memory.measure(lambda: x.view(1024, 1024).T, "cpu")
    assert (found["peak_extra_bytes"], found["required_over_peak"]) == (0, None)


def test_temporaries_freed_before_the_peak_do_not_add_up():
    def call():
        for _ in range(3):
            torch.zeros(2 * MIB, dtype=torch.uint8)

    assert memory.measure(call, "cpu")["peak_extra_bytes"] == 2 * MIB


def test_running_peak():
    assert memory.running_peak([5, 7, -5, 2, -9]) == (12, 0)
    assert memory.running_peak([]) == (0, 0)


def test_the_record_agrees_with_the_resident_set_at_the_peak():
    def resident():
        text = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(r"VmRSS:\s+(\d+)", text)[1])

    seen = []

    def call():
        a = torch.ones(64 * MIB, dtype=torch.uint8)
        b = torch.ones(96 * MIB, dtype=torch.uint8)
        seen.append(resident())
        del a
        return b

    found = memory.measure(call, "cpu")
    before = resident()
    call()
    assert found["peak_extra_bytes"] == 160 * MIB
    assert seen[-1] - before == pytest.approx(160 * MIB, abs=8 * MIB)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_peak_and_launches():
    x = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    found = memory.measure(lambda: (x + 1).add_(1), "cuda")
    assert found["output_bytes"] == found["peak_extra_bytes"] == 64 * MIB
    assert found["launches"] == 2
