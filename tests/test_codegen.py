"""Code without hardware: the parsers, the cache, four facts about real targets, and the code
gate."""

import json
from dataclasses import replace

import pytest

from harness import UsageError
from harness.check import consumers
from harness.codegen import compiler as codegen
from harness.codegen import isa_amd, isa_nvidia, preparers
from harness.codegen import rules as codegen_gate
from harness.codegen.chips import CHIPS
from kernels.catalog import LAYOUTS
from kernels.fused.consume import matmul_launch
from kernels.select import choose_mxfp4, should_use_cdna4_mx_scale_swizzle
from kernels.weights import WEIGHTS

STRIDED = LAYOUTS["strided"]
N, K = 5760, 2880


def consumer(arch, value="strided", scale="strided", **change):
    return consumers.launch(arch, LAYOUTS[value], LAYOUTS[scale], N, K, **change)


# Everything the tests below compile, in one go: two processes share it.
WORK = {
    "b200": (consumer("sm100", "blackwell_value", "blackwell_scale"), "sm100"),
    "b200 strided": (consumer("sm100"), "sm100"),
    "b200 planted": (
        matmul_launch(
            STRIDED,
            # The 128x4 tile with two of its axes exchanged: a bijection, but not what the unit
            # reads.
            replace(
                LAYOUTS["blackwell_scale"],
                pattern="(rn no ni) (rk kk) -> (rn rk) (no ni kk)", name="planted",
            ),
            m=128, n=N, k=K, experts=8, **consumers.CONFIG["sm100"],
        ),
        "sm100",
    ),
    "gfx950": (consumer("gfx950", scale="cdna4_scale"), "gfx950"),
    "gfx950 strided": (consumer("gfx950"), "gfx950"),
    "sm120": (consumer("sm120", "blackwell_value", "blackwell_scale"), "sm120"),
    "h200": (consumer("sm90", "hopper_value_v3", "hopper_scale_w8"), "sm90"),
    "h200 strided": (consumer("sm90"), "sm90"),
    "prepare hopper value": (
        preparers.launch(LAYOUTS["hopper_value_v3"], N, K // 2, "sm90"), "sm90"
    ),
    "prepare cdna4": (preparers.launch(LAYOUTS["cdna4_scale"], N, K // 32, "gfx950"), "gfx950"),
    "prepare trtllm": (preparers.launch(LAYOUTS["trtllm_w13"], N, K // 2, "sm100"), "sm100"),
    "canary sm90": (codegen.canary_launch("sm90"), "sm90"),
    "canary gfx950": (codegen.canary_launch("gfx950"), "gfx950"),
    "canary gfx1250": (codegen.canary_launch("gfx1250"), "gfx1250"),
}  # fmt: skip


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(codegen.CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        return dict(zip(WORK, codegen.compile_many(WORK.values()), strict=True))


def narrow(record):
    """Global accesses of one or two bytes a lane."""
    return sum(record["global_loads"].get(w, 0) for w in ("1", "2"))


def test_sm100_scales_go_from_shared_to_tensor_memory(code):
    """With the Blackwell layout tcgen05.cp copies scales; linear ones go through registers."""
    assert code["b200"]["scale_path"]["tcgen05.cp 32x128b"] >= 1
    assert "tcgen05.cp 32x128b" not in code["b200 strided"]["scale_path"]
    assert (
        code["b200 strided"]["scale_path"]["tcgen05.st"] > code["b200"]["scale_path"]["tcgen05.st"]
    )


def test_gfx950_scale_loads_are_wider(code):
    assert narrow(code["gfx950"]) <= narrow(code["gfx950 strided"]) // 2
    assert code["gfx950"]["matrix"] == code["gfx950 strided"]["matrix"]
    assert all(n.startswith("v_mfma_scale_") for n in code["gfx950"]["matrix"])


@pytest.mark.parametrize(("tp_size", "on"), [(1, True), (2, True), (4, False), (8, False)])
def test_cdna4_swizzle_by_tp(tp_size, on):
    assert should_use_cdna4_mx_scale_swizzle("gfx950", tp_size) is on
    scale = choose_mxfp4("gfx950", tp_size).scale.name
    assert scale == ("cdna4_scale" if on else "strided")


def test_sm120_has_native_mxf4_from_triton_3_6_on(code):
    """3.4.0 and 3.5.1 fall back to bf16 mma (measured in environments of their own)."""
    major, minor = (int(x) for x in code["sm120"]["triton"].split(".")[:2])
    native = any("mxf4" in name for name in code["sm120"]["matrix"])
    assert native is ((major, minor) >= (3, 6))


def test_hopper_swizzle_leaves_no_byte_loads_from_shared_memory(code):
    assert "1" not in code["h200"]["shared_loads"]
    assert code["h200 strided"]["shared_loads"]["1"] >= 64
    assert code["h200"]["instructions"] < code["h200 strided"]["instructions"]
    assert all(name.startswith("wgmma") for name in code["h200"]["matrix"])


def test_planted_scale_layout_loses_the_scale_copy_and_the_gate_says_so(code):
    assert "tcgen05.cp 32x128b" not in code["b200 planted"]["scale_path"]
    found = codegen_gate.compare_codegen(code["b200"], code["b200 planted"])
    lost = [f for f in found if f.what == "scale_path" and "tcgen05.cp" in f.sentence]
    assert lost and lost[0].code == 1 and "0 x tcgen05.cp 32x128b (was 2)" in lost[0].sentence


@pytest.mark.parametrize(
    ("name", "reads"), [("hopper value", "16"), ("cdna4", "2"), ("trtllm", "16")]
)
def test_preparation_kernels_store_16_bytes_a_lane_and_do_not_spill(code, name, reads):
    """Rows of 90 groups are aligned to 2 bytes only, so their scales cannot be read wider."""
    record = code[f"prepare {name}"]
    assert set(record["global_stores"]) == {"16"} and set(record["global_loads"]) == {reads}
    assert record["spills"] == 0


@pytest.mark.parametrize("arch", ["sm90", "gfx950", "gfx1250"])
def test_canary_spills(code, arch):
    assert code[f"canary {arch}"]["spills"] > 0


def test_parser_that_misses_the_canary_is_exit_4(code):
    cell = {"target": "sm90", "triton": "3.9.0", "kernels": {}}
    with pytest.raises(codegen_gate.CanaryMissed, match="must spill"):
        codegen_gate.compare_codegen(cell, cell | {"canary_spills": 0})
    assert issubclass(codegen_gate.CanaryMissed, UsageError)  # __main__ makes exit 4 of it
    assert codegen_gate.compare_codegen(cell, cell | {"canary_spills": 5}) == []


def test_same_code_gives_no_finding(code):
    for record in code.values():
        assert codegen_gate.compare_codegen(record, record) == []


CHANGES = {
    "spills": lambda r: r | {"spills": r["spills"] + 1},
    "global reads": lambda r: r | {"global_loads": {"1": 40}, "async_copies": {"4": 60}},
    "global writes": lambda r: r | {"global_stores": {"2": 128}},
    "async copies": lambda r: r | {"async_copies": {}, "global_loads": {"16": 99}},
    "matrix": lambda r: r | {"matrix": {n: c - 1 for n, c in r["matrix"].items()}},
    "scale_path": lambda r: r | {"scale_path": {}},
    "occupancy": lambda r: r | {"occupancy": r["occupancy"] | {"blocks": 1}},
    "instructions": lambda r: r | {"instructions": r["instructions"] * 111 // 100},
}


@pytest.mark.parametrize("what", CHANGES)
def test_each_rule_fires_alone_and_its_opposite_asks_to_pin(code, what):
    record = code["gfx950"]
    worse = CHANGES[what](record)
    found = codegen_gate.compare_codegen(record, worse)
    assert {f.what for f in found if f.code == 1} == {what}, found
    back = codegen_gate.compare_codegen(worse, record)
    assert {f.what for f in back if f.verdict == "FASTER"} >= {what}
    assert all(f.code == 0 and "pin" in f.sentence for f in back if f.verdict == "FASTER")


def test_ten_percent_more_instructions_is_allowed(code):
    record = code["gfx950"]
    assert (
        codegen_gate.compare_codegen(
            record, record | {"instructions": record["instructions"] * 109 // 100}
        )
        == []
    )


def test_another_triton_is_not_comparable_but_says_what_moved(code):
    worse = CHANGES["instructions"](code["gfx950"]) | {"triton": "3.6.0"}
    rule, metrics = codegen_gate.compare_codegen(code["gfx950"], worse)
    assert (rule.verdict, rule.code, rule.what) == ("NOT_COMPARABLE", 0, "instructions")
    assert "3.6.0" in rule.sentence and metrics.what == "metrics" and metrics.code == 0
    before, after = code["gfx950"]["instructions"], worse["instructions"]
    assert f"instructions {before} -> {after}" in metrics.sentence
    (judged,) = codegen_gate.compare_codegen(code["gfx950"], worse, across_versions=True)
    assert judged.code == 1


def test_cell_that_lost_a_kernel_or_no_longer_compiles():
    good = {"kernel": "x", "error": "no"}
    cell = lambda kernels: {"target": "sm90", "triton": "3.9.0", "kernels": kernels}
    (lost,) = codegen_gate.compare_codegen(cell({"w13": good}), cell({}))
    assert (lost.verdict, lost.code) == ("LOST", 3)
    (broken,) = codegen_gate.compare_codegen(cell({"w13": {"spills": 0}}), cell({"w13": good}))
    assert broken.code == 1 and "no longer compiles: no" in broken.sentence


def test_nothing_parsed_is_an_error():
    with pytest.raises(ValueError, match="zero kernels parsed"):
        isa_nvidia.parse_sass("\tcode for sm_90a\n")
    with pytest.raises(ValueError, match="zero kernels parsed"):
        isa_nvidia.parse_resources("Resource usage:\n Common:\n")
    with pytest.raises(ValueError, match="zero kernels parsed"):
        isa_amd.parse("\t.text\n\t.globl x\n")
    with pytest.raises(ValueError, match="vgpr_count"):
        isa_amd.parse("\ts_endpgm\n")


SASS = """
        /*0000*/              @!P0 LDG.E.128.CONSTANT R4, [R2] ;       /* 0x0 */
        /*0010*/                   LDG.E.U8 R8, [R2+0x10] ;            /* 0x0 */
        /*0020*/                   LDGSTS.E.BYPASS.LTC128B.128 [R9], [R2.64], P1 ; /* 0x0 */
        /*0030*/             @!UP1 LDSM.16.M88.4 R4, [R5] ;            /* 0x0 */
        /*0040*/                   STL.64 [R1+0x8], R4 ;               /* 0x0 */
        /*0050*/                   STG.E desc[UR4][R2.64], R4 ;        /* 0x0 */
        /*0060*/                   NOP ;                               /* 0x0 */
"""


def test_sass_widths_and_spills():
    found = isa_nvidia.parse_sass(SASS)
    assert found["global_loads"] == {"1": 1, "16": 1}
    assert found["async_copies"] == {"16": 1} and found["global_stores"] == {"4": 1}
    assert found["shared_loads"] == {"16": 1} and found["spills"] == 1
    assert found["instructions"] == 6 and found["code_bytes"] == 0x70


def test_amdgcn_widths_and_kinds():
    text = "\n".join([
        "\tglobal_load_ubyte v1, v2, s[0:1]", "\tglobal_load_lds_dwordx4 v[2:3], off",
        "\tbuffer_load_dword v1, s[0:3], 0 offen lds", "\tds_read2_b64 v[0:3], v4",
        "\tds_read_b128 v[0:3], v4", "\tv_mfma_f32_32x32x16_bf16 a, b, c", "\ts_barrier",
        "\tscratch_store_dword off, v1, s32", "\ts_endpgm", "\t.amdhsa_kernel x",
        "; codeLenInByte = 64",
        "; Occupancy: 3", "    .vgpr_count:     32", "    .sgpr_count:     20",
    ])  # fmt: skip
    found = isa_amd.parse(text)
    assert found["global_loads"] == {"1": 1} and found["async_copies"] == {"4": 1, "16": 1}
    assert found["shared_loads"] == {"16": 2} and found["spills"] == 1
    assert found["matrix"] == {"v_mfma_f32_32x32x16_bf16": 1} and found["waves_per_simd"] == 3


def test_cache_answers_without_a_compiler_and_knows_its_key(code, tmp_path, monkeypatch):
    monkeypatch.setenv(codegen.CACHE_VARIABLE, str(tmp_path))
    work = WORK["gfx950"]
    name = codegen.key(codegen.describe(*work))
    codegen._keep(name, code["gfx950"])
    monkeypatch.setattr(codegen, "_ask", lambda *_: pytest.fail("compiled what was cached"))
    assert codegen.compile_one(*work) == code["gfx950"]
    other = replace(work[0], num_warps=8)
    assert codegen.key(codegen.describe(other, "gfx950")) != name
    monkeypatch.setattr(codegen, "triton_version", lambda: "3.6.0")
    assert codegen.key(codegen.describe(*work)) != name


def test_integers_reach_the_key_only_as_the_compiler_sees_them():
    spec = lambda n: codegen.describe(replace(consumer("sm90"), integers={"N": n}), "sm90")
    assert spec(32) == spec(48) and spec(33) == spec(35)
    assert len({json.dumps(spec(n)) for n in (1, 32, 33)}) == 3


def test_compiler_that_refuses_or_dies_is_an_error_not_a_record(monkeypatch, tmp_path):
    monkeypatch.setenv(codegen.CACHE_VARIABLE, str(tmp_path))
    bad = codegen.canary_launch("sm90") | {"constants": {"BLOCK": 100}}  # no power of two
    with pytest.raises(codegen.CompileError, match="canary_kernel for sm90: .*power of 2"):
        codegen.compile_one(bad, "sm90")
    (record,) = codegen.compile_many([(bad, "sm90")], errors=True)
    assert "power of 2" in record["error"] and not list(tmp_path.rglob("*.json"))
    with pytest.raises(UsageError, match="sm91"):
        codegen.compile_one(bad, "sm91")


@pytest.mark.parametrize("arch", CHIPS)
def test_occupancy_is_limited_by_what_is_scarce(arch):
    chip = CHIPS[arch]
    assert chip.occupancy(32, chip.shared // 2 - chip.reserved, 4)["blocks"] == 2
    assert chip.occupancy(32, 0, 4)["limit"] in ("warps", "registers", "blocks")
    assert chip.occupancy(32, chip.shared + 1, 4)["blocks"] == 0


def test_cell_of_an_absent_device_has_code_and_passes_the_gate(code, monkeypatch, tmp_path):
    """gfx950 without an AMD device: the row's evidence, and the gate on a planted loss."""
    from harness import rows
    from harness.codegen import bound
    from harness.gate import rules as gate_rules
    from harness.plan import config
    from harness.plan.grid import plan
    from harness.run.cell import run_cell

    monkeypatch.setenv(codegen.CACHE_VARIABLE, str(tmp_path))
    (cell,) = plan(["hw=gfx950", "model=gpt_oss_120b", "path=mxfp4_triton", "tp_size=1"]).cells
    found = codegen.for_cell(cell)
    assert found["target"] == "gfx950" and found["canary_spills"] > 0
    assert set(found["kernels"]) == {"w13", "w2"}
    fused = preparers.of_cell(cell | {"impl": {"name": "fused"}})
    assert set(fused) == {f"prepare_{name}" for name in WEIGHTS} and not preparers.of_cell(cell)
    absent = run_cell(cell | {"impl": {"name": "fused"}})
    assert absent["status"] == "skipped"  # and its code is read all the same
    assert set(absent["codegen"]["kernels"]) == {*fused, "w13", "w2"}
    rows.validate(absent)
    row = {"cell": cell["cell"], "codegen": found}
    assert gate_rules.codegen(row, row) == []
    w13 = found["kernels"]["w13"]
    spilled = found | {"kernels": found["kernels"] | {"w13": w13 | {"spills": 7}}}
    (finding,) = gate_rules.codegen(row, row | {"codegen": spilled})
    assert finding.code == 1 and "7 spill instructions (was 0)" in finding.sentence
    limit = bound.for_cell(cell, {"s": LAYOUTS["cdna4_scale"]}, {"s": (128, N, K // 32)})
    assert limit["bytes"] == 128 * (N * 90 + N * 96) and limit["source"] == "datasheet"
    assert limit["floor_us"] == pytest.approx(limit["bytes"] / 8.0e12 * 1e6, abs=1e-3)
    cpu = cell | {"hw": config.group_config("hw", "cpu")}
    assert codegen.for_cell(cpu) is None and bound.for_cell(cpu, {}, {})["floor_us"] is None


def test_segments_and_bank_conflicts_by_index_map():
    from harness.codegen import bound

    chip = CHIPS["sm90"]
    strided = bound.of_layout(STRIDED, 256, 128, chip)
    # 32 lanes along k are one 32-byte sector; 32 rows of 128 bytes are 32 of them.
    assert strided["segments"]["32"] == {"along_k": 1.0, "down_n": 32.0}
    assert strided["segments_fewest"] == {"32": 1, "64": 1, "128": 1}
    assert strided["bank_conflicts"] == 32  # rows 128 bytes apart share a bank
    tiled = bound.of_layout(LAYOUTS["blackwell_scale"], 256, 128, chip)
    assert tiled["segments"]["128"]["down_n"] == 4.0  # rows 16 bytes apart: 512 bytes
    assert tiled["bank_conflicts"] == 4
    padded = bound.of_layout(LAYOUTS["blackwell_scale"], 130, 90, chip)
    assert (padded["stored_bytes"], padded["overhead"]) == (256 * 96, 2.1005)
