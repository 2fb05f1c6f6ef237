"""`compare`: what it answers for two targets, for two variants, and what it refuses."""

import json
import time

import pytest

from harness import UsageError
from harness.codegen import compiler as codegen
from harness.codegen.chips import CHIPS
from harness.compare import tables as compare_show
from harness.compare import targets as compare
from harness.plan.config import group_config
from kernels.catalog import LAYOUTS


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(codegen.CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        start = time.perf_counter()
        cold = compare.compare({"hw": "gfx950,h200", "model": "gpt_oss_120b", "tp_size": "1,2,4,8"})
        middle = time.perf_counter()
        cached = compare.compare(
            {"hw": "gfx950,h200", "model": "gpt_oss_120b", "tp_size": "1,2,4,8"}
        )
        seconds = middle - start, time.perf_counter() - middle
    assert cached == cold
    return cold, seconds


def test_cold_in_two_minutes_and_cached_in_ten_seconds(found):
    assert found[1][0] < 120 and found[1][1] < 10


def test_layouts_and_rules_of_each_tp(found):
    gfx950, h200 = found[0]["targets"]
    assert [r["scale"] for r in gfx950["rows"]] == ["cdna4_scale"] * 2 + ["strided"] * 2
    assert {r["value"] for r in h200["rows"]} == {"hopper_value_v3"}
    for row in (*gfx950["rows"], *h200["rows"]):
        assert "vllm" in row["source"] and row["reason"]
        assert row["stored_bytes"] - row["useful_bytes"] == row["padded_bytes"] >= 0
        assert row["preparation_bytes"] == row["useful_bytes"] + row["stored_bytes"]


def test_bound_is_bytes_over_the_datasheet(found):
    for target in found[0]["targets"]:
        rate = group_config("hw", target["hw"])["hbm_bytes_per_s"]
        for row in target["rows"]:
            assert row["bound_us"] == pytest.approx(row["preparation_bytes"] / rate * 1e6, abs=0.06)


def test_useful_bytes_are_the_checkpoint(found):
    """TP 1 of gpt-oss-120b: 128 experts of 5760 x 2880 and 2880 x 2880, 4.25 bits an element."""
    row = found[0]["targets"][1]["rows"][0]
    assert row["useful_bytes"] == 128 * (5760 * 2880 + 2880 * 2880) * 17 // 32


def test_code_stands_side_by_side_and_advice_cites_it(found):
    for target, line in zip(found[0]["targets"], found[0]["advice"], strict=True):
        assert len(target["code"]) == 2 and not any("error" in r for r in target["code"].values())
        assert target["moved"] and target["hw"] in line and "Evidence: " in line
        layouts = {name for row in target["rows"] for name in (row["value"], row["scale"])}
        assert set(target["preparing"]) == layouts - {"strided"}
        assert all(r["spills"] == 0 and r["instructions"] for r in target["preparing"].values())
        first = target["moved"][0]["sentence"]
        assert first in line


def test_markdown_and_terminal_hold_every_row(found, capsys):
    text = compare_show.markdown(found[0])
    compare_show.terminal(found[0])
    shown = capsys.readouterr().out
    for target in found[0]["targets"]:
        for label, _ in compare_show.METRICS:
            assert label in text and label in shown
        assert f"## {target['hw']}" in text
    kinds = compare_show.METRICS, compare_show.PREPARING
    assert text.count("\n| ") == 2 * (2 + 4 + sum(2 + len(kind) for kind in kinds))
    json.dumps(found[0])


def test_no_time_without_a_measurement(found, monkeypatch, tmp_path):
    gfx950 = found[0]["targets"][0]
    assert gfx950["measured"] == [] and "no time was taken" in found[0]["advice"][0]
    line = {"model": "gpt_oss_120b", "matrix": "w13", "m": 16, "strided_us": 90.0,
            "prepared_us": 60.0,
            "ratio": 1.5, "prepare_us": 600.0, "steps": 20.0, "decided": True}  # fmt: skip
    rows = {
        "hw": "h200",
        "device": "NVIDIA H200",
        "torch": "2",
        "triton": "3",
        "break_even": [line],
    }
    (tmp_path / "consumer_x.json").write_text(json.dumps(rows))
    monkeypatch.setattr(compare, "MEASURED", tmp_path)
    assert compare.measured("gfx950", "gpt_oss_120b") == []
    target = gfx950 | {"measured": compare.measured("h200", "gpt_oss_120b")}
    assert any("pays within 20 steps" in text for text in compare_show._times(target))
    assert "measured 1.50x to 1.50x, 1 of 1 points decided" in compare_show.advice(target)


def test_variants_of_one_target(found, monkeypatch, tmp_path):
    monkeypatch.setattr(
        codegen, "compile_many", lambda work, errors: [{"error": "off"} for _ in work]
    )
    result = compare.compare({"hw": "gfx950", "variant": "cdna4,strided", "tp_size": "1"})
    assert list(result["targets"][0]["code"]) == ["cdna4", "strided"]
    assert compare._variant("hopper_scale", compare.select.choose_mxfp4("sm90")) == (
        LAYOUTS["hopper_value_v3"], LAYOUTS["hopper_scale_w8"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["hw=b200"], "nothing to compare"),
        (["hw=b200,h2000"], "h200"),
        (["hw=b200,cpu"], "no compiler target"),
        (["hw=b200,h200", "tp_sise=1"], "tp_size"),
        (["hw=b200,h200", "tp_size=0"], "at least 1"),
        (["hw=b200,h200", "experts=many"], "whole numbers"),
        (["b200"], "no key=value"),
        (["measure=time"], "consumer"),
    ],
)
def test_refusals_say_what_to_write(argv, says):
    with pytest.raises(UsageError, match=says):
        compare.main(argv)


def test_measure_without_a_device_is_exit_3(capsys):
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        pytest.skip("an sm90 device is here: measure=consumer would run for minutes")
    assert compare.main(["measure=consumer"]) == 3
    assert "NO_DEVICE" in capsys.readouterr().err


def test_env_and_impl_go_to_compare_env(monkeypatch):
    from harness.compare import versions as compare_env

    seen = []
    monkeypatch.setattr(compare_env, "main", lambda argv: seen.append(argv) or 1)
    assert compare.main(["env=a,b", "hw=b200"]) == 1 and compare.main(["impl=x,y"]) == 1
    assert seen == [["env=a,b", "hw=b200"], ["impl=x,y"]]


def test_every_compiler_target_has_a_consumer():
    from harness.check import consumers

    assert set(consumers.CONFIG) == set(CHIPS)


def test_break_even_is_preparation_over_saving_and_noise_decides_nothing():
    from harness.measure import consumer_time

    row = lambda m, variant, us, iqr=0.01: {
        "model": "x", "matrix": "w13", "m": m, "variant": variant, "median_us": us, "rel_iqr": iqr,
    }  # fmt: skip
    rows = [
        row(1, "strided", 100.0), row(1, "prepared", 80.0),  # saves 20
        row(16, "strided", 100.0, 0.1), row(16, "prepared", 95.0, 0.1),  # saves 5 of noise 20
        row(128, "strided", 100.0), row(128, "prepared", 130.0),  # costs 30
        row(1024, "strided", None), row(1024, "prepared", 1.0),  # one side not measured: no line
    ]  # fmt: skip
    prep = [{"model": "x", "matrix": "w13", "value_us": 390.0, "scale_us": 10.0}]
    found = {line["m"]: line for line in consumer_time.break_even(rows, prep)}
    assert set(found) == {1, 16, 128}
    assert (found[1]["steps"], found[1]["decided"], found[1]["ratio"]) == (20.0, True, 1.25)
    assert (found[16]["steps"], found[16]["decided"]) == (None, False)
    assert (found[128]["steps"], found[128]["decided"]) == (None, True)


def test_measured_points_exceed_the_cache_and_cover_both_variants():
    from harness.measure import consumer_time

    model = group_config("model", "gpt_oss_120b")
    points = consumer_time.points([model], [1, 1024], "sm90")
    assert {p.variant for p in points} == {"prepared", "strided"} and len(points) == 8
    for point in points:
        assert point.experts * point.n * point.k // 2 >= consumer_time.WEIGHT_BYTES
        for config in consumer_time.configs(point.variant, point.m):
            launch = consumer_time.planned(point, config)
            assert launch.grid[2] == point.experts
            assert (launch.kernel == "hopper_matmul_kernel") == (point.variant == "prepared")
