"""Which rows a rank owns and how it is padded: blocks, refusals, experts, and the truth table."""

import pytest

from harness.plan import truth
from kernels import pads
from kernels.errors import LayoutError
from kernels.shard import plan

GPT = {"experts": 32, "hidden": 2880, "intermediate": 2880, "activation": "swigluoai"}


def ranks(path: str, target: str, tp_size: int, **sizes):
    return [plan(path, target, tp_size=tp_size, tp_rank=r, **sizes) for r in range(tp_size)]


@pytest.mark.parametrize("path", pads.FORMAT)
@pytest.mark.parametrize("tp_size", [1, 2, 3, 4, 8, 16])
def test_ranks_own_whole_blocks_and_together_everything(path, tp_size):
    for size in (2880, 704, 640, 1280, 1408, 1536, 1856, 3072, 14336, 40):
        plans = ranks(
            path, "sm100", tp_size, experts=4, hidden=256, intermediate=size, activation="silu"
        )
        block, at = plans[0].block, 0
        for p in plans:
            assert p.start == at or not p.real
            assert p.start % block == 0 or not p.real
            assert p.real <= p.per_rank <= p.padded_intermediate
            at += p.real
        assert at == size
        assert len({p.padded_intermediate for p in plans}) == 1  # ranks run one kernel shape


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_pieces_cover_each_checkpoint_row_once_and_gate_never_meets_up(tp_size, interleaved):
    seen: dict[str, list[int]] = {}
    for p in ranks("mxfp4_triton", "sm90", tp_size, **GPT | {"interleaved": interleaved}):
        for piece in p.pieces():
            seen.setdefault(piece.tensor, []).extend(range(piece.start, piece.stop, piece.step))
            if piece.tensor.startswith("w13"):
                half = piece.part == "up"
                assert piece.into == half * p.padded_intermediate
                assert piece.length <= p.padded_intermediate
    sizes = {"w13_weight": 5760, "w13_scale": 5760, "w13_bias": 5760, "w2_weight": 1440}
    for tensor, size in (sizes | {"w2_scale": 90, "w2_bias": 2880}).items():
        assert sorted(seen[tensor]) == list(range(size)), tensor


@pytest.mark.parametrize(("experts", "ep_size"), [(128, 8), (128, 3), (5, 4), (7, 7), (384, 16)])
def test_experts_are_split_without_gap_or_overlap(experts, ep_size):
    sizes = GPT | {"experts": experts}
    plans = [
        plan("mxfp4_triton", "sm90", ep_size=ep_size, ep_rank=r, **sizes) for r in range(ep_size)
    ]
    owned = [e for p in plans for e in range(p.expert_start, p.expert_start + p.expert_count)]
    assert owned == list(range(experts))
    counts = [p.expert_count for p in plans]
    assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": 2881}, ["w13_weight", "hidden size 2881", "odd"]),
        ({"intermediate": 2879}, ["w2_weight", "intermediate size 2879", "odd"]),
        ({"ep_size": 64}, ["32 experts", "ep_size 64"]),
    ],
)
def test_a_refusal_names_tensor_size_and_rule(change, words):
    refused = plan("mxfp4_triton", "sm90", **GPT | change)
    assert refused.outcome == "refused"
    assert all(word in refused.reason for word in words), refused.reason
    with pytest.raises(LayoutError, match=words[0]):
        refused.require()


def test_a_path_without_a_kernel_on_the_target_is_refused_with_those_that_have():
    refused = plan("nvfp4_trtllm", "gfx950", **GPT)
    assert refused.outcome == "refused"
    assert "gfx950" in refused.reason and "mxfp4_triton" in refused.reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tp_size": 4, "tp_rank": 4}, "tp_rank=4 .* tp_size=4"),
        ({"ep_size": 2, "ep_rank": -1}, "ep_rank=-1"),
        ({"hidden": 0}, "hidden=0"),
        ({"activation": "swish"}, "swish"),
    ],
)
def test_a_question_without_sense_raises(change, words):
    with pytest.raises(LayoutError, match=words):
        plan("mxfp4_triton", "sm90", **GPT | change)


def test_unknown_path_and_target_are_answered_with_close_matches():
    with pytest.raises(LayoutError, match="did you mean mxfp4_triton"):
        plan("mxfp4_tritn", "sm90", **GPT)
    with pytest.raises(LayoutError, match="did you mean sm90"):
        plan("mxfp4_triton", "sm_90", **GPT)


def test_a_plan_prints_ranges_padding_reason_and_source():
    text = str(plan("mxfp4_triton", "gfx950", tp_size=8, tp_rank=7, **GPT))
    for words in ("[2688, 2880) of 2880", "192 real in 512", "1.33x", "BLOCK_K", "sglang#27858"):
        assert words in text


def test_ranks_past_the_last_block_say_so():
    last = plan("mxfp4_triton", "sm90", tp_size=16, tp_rank=15, **GPT)
    assert last.real == 0 and last.padded_intermediate == 192
    assert any("rank 15 of 16" in note and "padding only" in note for note in last.notes)


def test_the_per_token_hidden_tile_of_trtllm():
    sizes = {"experts": 128, "hidden": 2688, "intermediate": 1856, "activation": "relu2_no_mul"}
    assert plan("nvfp4_trtllm", "sm100", **sizes).padded_hidden == 2816
    assert plan("nvfp4_trtllm", "sm100", per_token=True, **sizes).padded_hidden == 3072
    gated = sizes | {"activation": "silu"}
    assert plan("nvfp4_trtllm", "sm100", per_token=True, **gated).padded_hidden == 2816


def test_the_committed_truth_table_is_current():
    assert truth.PAGE.read_text() == truth.page()


# (hardware, model, path, tp_size) -> the cell, worked out by hand from the rules in vLLM 0.33.
PINNED = {
    ("h200", "gpt_oss_20b", "mxfp4_triton", 1): "ok",
    ("h200", "gpt_oss_20b", "mxfp4_triton", 4): "padded(768, 1.04x; bytes 1.07x)",
    ("h200", "gpt_oss_20b", "mxfp4_triton", 8): "padded(384, 1.00x; bytes 1.07x)",
    ("gfx950", "gpt_oss_20b", "mxfp4_triton", 8): (
        "padded(512, 1.33x; H 3072, 1.07x; bytes 1.52x)"),
    ("b200", "glm45_air", "nvfp4_trtllm", 8): "padded(192, 1.09x; bytes 1.09x)",
    ("b200", "nemotron_nano", "nvfp4_trtllm", 4): (
        "padded(512, 1.10x; H 2816, 1.05x; bytes 1.16x)"),
    ("b200", "nemotron_nano", "nvfp4_cutlass", 1): "padded(1920, 1.03x; bytes 1.03x)",
    ("b200", "ragged", "nvfp4_cutedsl", 2): "padded(384, 1.09x; H 1536, 1.02x; bytes 1.11x)",
    ("b200", "ragged", "nvfp4_trtllm", 4): "padded(192, 1.09x; H 1536, 1.02x; bytes 1.11x)",
    ("b200", "deepseek_r1_nvfp4", "nvfp4_cutedsl", 8): "ok",
    ("b200", "qwen3_235b", "nvfp4_cutlass", 8): "ok",
    ("h200", "kimi_k2", "nvfp4_trtllm", 1): "refused(no kernel on sm90 reads this form)",
    ("gfx950", "mixtral_8x7b", "nvfp4_cutlass", 2): "refused(no kernel on gfx950 reads this form)",
}  # fmt: skip


def test_the_truth_table_holds_every_cell_and_the_pinned_ones():
    table = {(hw, model, path, tp): made for hw, model, path, tp, made in truth.cells()}
    assert len(table) == 3 * 11 * 5 * 5
    assert {key: truth.verdict(table[key]) for key in PINNED} == PINNED
    for key, made in table.items():
        assert made.outcome in ("ok", "padded", "refused"), key
        assert made.outcome == "ok" or made.reason, key


def test_the_truth_command_notices_a_page_that_is_not_current(monkeypatch, capsys):
    assert truth.main(["--check"]) == 0
    monkeypatch.setattr(truth, "page", lambda: truth.PAGE.read_text() + "more\n")
    assert truth.main(["--check"]) == 2
    assert "python -m harness.plan.truth" in capsys.readouterr().out
