"""Expert load balancing over real torch.distributed processes; see harness/eplb.py."""

import json

import pytest
import torch

from harness import eplb
from kernels.prepare import prepare


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_agrees_over_gloo(world, capsys):
    assert eplb.main(["--backend", "gloo", "--world", str(world)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["faults"] == {str(rank): [] for rank in range(world)}
    assert result["paths"] == list(eplb.PATHS_CHECKED)


def test_the_check_of_a_rank_sees_an_amax_that_stayed_local_and_an_expert_left_behind(monkeypatch):
    """The same check in one process, with collectives that do nothing."""
    gathered = lambda everyone, raw: [part.copy_(raw) for part in everyone]
    monkeypatch.setattr(torch.distributed, "all_gather", gathered)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: None)
    faults = eplb.check_rank(0, 2, "cpu", "reference")
    assert any("nvfp4_cutedsl: amax, EPLB True" in fault for fault in faults)
    assert any("mxfp4_triton: w13_weight" in fault and "bytes differ" in fault for fault in faults)
    assert any("view of w13_scale does not see the move" in fault for fault in faults)


def test_a_rearrangement_of_the_checkpoint_moves_every_tensor_of_an_expert():
    weights = eplb.layer("nvfp4_trtllm", 4, "cpu")
    order = [3, 1, 0, 2]
    one = prepare("nvfp4_trtllm", eplb.moved(weights, order), target=eplb.TARGET)
    two = prepare("nvfp4_trtllm", weights, target=eplb.TARGET).rearrange_(order)
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor.view(torch.uint8), two.tensors[name].view(torch.uint8)), name
