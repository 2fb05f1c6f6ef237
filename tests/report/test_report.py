"""Reports as text: facts, verdicts, Markdown, figures, README, the command and the gallery."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import made
import pytest

from harness import UsageError, report, rows
from harness.report import code, evidence, facts, gallery, load, readme
from harness.report.findings import findings
from harness.report.trace import digits, duration, plain, size
from kernels import catalog

Run = Callable[[str], tuple[Path, Path]]


def told(rows_: list[made.Row], planned: int = 0) -> facts.Facts:
    manifest = {"cells": [{"cell": r["cell"]} for r in rows_]
                + [{"cell": made.cell(path="later", seed=i)} for i in range(planned)]}  # fmt: skip
    return facts.facts([load.build("run", rows_, 0, manifest)])


def test_numbers_are_written_with_their_unit() -> None:
    assert [duration(v) for v in (0.5, 12.345, 999, 3950.0, 45.7e6)] == [
        "0.500 µs", "12.3 µs", "999 µs", "3.95 ms", "45.7 s"]  # fmt: skip
    assert [size(v) for v in (0, 512, 2048, 72 * 2**20, 9113 * 2**20)] == [
        "0 B", "512 B", "2.00 KiB", "72.0 MiB", "8.90 GiB"]  # fmt: skip
    assert [digits(v) for v in (0, 1234.5, 0.01234, 20.16)] == ["0", "1234", "0.0123", "20.2"]


def test_every_cell_is_counted_once_in_a_state() -> None:
    mixed = made.mixed()
    found = told(mixed, planned=7)
    assert sum(found.states.values()) == found.total == len(mixed) + 7
    assert found.states["missing"] == 7
    assert found.states["failed"] == 3
    for coverage in found.coverage:
        counted = int(coverage.have.text) + sum(int(n.text) for _, n, _ in coverage.reasons)
        assert counted == int(coverage.total.text) == found.total, coverage.label
    codes = {reason for reason, _, _ in found.coverage[1].reasons}
    assert codes == {*rows.ABSENT, "NOT_REACHED"}


def test_a_resumed_run_counts_the_last_row_of_a_cell() -> None:
    first, second = made.mixed()[:1], made.mixed()[:1]
    crashed = rows.finish(json.loads(json.dumps(first[0])), "crashed", "exit code -9")
    found = told([crashed, *second])
    assert found.total == 1
    assert found.states["failed"] == 0
    assert found.runs[0].replaced == 1


@pytest.mark.parametrize(("change", "level", "words"), [
    ("none", "good", "have exactly the right bytes"),
    ("wrong", "bad", "1 of 2 cells is wrong (mxfp4_triton)"),
    ("crashed", "warn", "1 of 2 cells gave no answer"),
    ("refused", "good", "1 of 2 cells have exactly the right bytes; 1 refused with a reason"),
])  # fmt: skip
def test_the_verdict_names_the_worst_first(change: str, level: str, words: str) -> None:
    pair = [row for row in made.mixed() if row["cell"]["path"] == "mxfp4_triton"][:2]
    if change != "none":
        rows.finish(pair[1], change, "because")
    found = told(pair)
    assert found.level == level
    assert words in plain(found.verdict)


def test_nothing_ok_is_never_a_good_verdict() -> None:
    pair = [rows.finish(row, "refused", "a rule") for row in made.mixed()[:2]]
    assert told(pair).level == "bad"
    assert plain(told([]).verdict) == "Nothing was run: there are no rows."


def test_padding_is_a_state_of_its_own() -> None:
    row = made.mixed()[0]
    for layout in row["layouts"].values():
        layout |= {"padded": layout["logical"], "pad_bytes": 0}
    assert load.state(row) == "ok"
    row["decisions"]["outcome"] = "padded"
    assert load.state(row) == "padded"
    row["decisions"].pop("outcome")
    row["layouts"]["w13_scale"]["padded"] = [9999, 1]
    assert load.state(row) == "padded"


def test_pairs_compare_one_cell_on_one_device_only() -> None:
    found = told(made.mixed())
    pairs = evidence.pairs(found.records)
    assert pairs
    for pair in pairs:
        same = {k: v for k, v in pair.after.cell.items() if k not in ("impl", "env")}
        assert same == {k: v for k, v in pair.before.cell.items() if k not in ("impl", "env")}
        assert pair.before.get("time.device") == pair.after.get("time.device")
        assert pair.same_bytes is (None if pair.before.vendor else True)
    other = json.loads(json.dumps(made.mixed()))
    for row in other:
        if row["cell"]["impl"] != "fused" and row["time"]:
            row["time"]["device"] = "NVIDIA H100"
    assert all(pair.before.vendor for pair in evidence.pairs(told(other).records))


def test_other_digests_are_said_and_shown() -> None:
    mixed = made.mixed()
    mixed[0]["digests"]["w13_weight"] = "sha256:0"
    found = told(mixed)
    told_ = [plain(f.text) for f in findings(found, evidence.pairs(found.records), [], [])]
    assert any("have other digests for mxfp4_triton" in text for text in told_)


def test_a_slope_is_the_exponent() -> None:
    series = []
    for experts in (8, 16, 64):
        row = made.ok(made.random.Random(0), experts=experts)
        row["time"]["median_us"] = 3.0 * experts**1.25
        series.append(row)
    (slope,) = evidence.slopes(told(series).records)
    assert slope.exponent == pytest.approx(1.25)
    assert any("grows faster" in plain(f.text) for f in findings(told(series), [], [slope], []))


def test_layouts_that_differ_by_target_and_tp_are_a_finding() -> None:
    found = told(made.mixed())
    sides = evidence.targets(found.records)
    texts = [plain(f.text) for f in findings(found, [], [], sides)]
    (scale,) = [text for text in texts if text.startswith("w13_scale of mxfp4_triton: ")]
    assert "gfx950 cdna4_scale at TP 1, 2 and strided at TP 4, 8" in scale
    assert "h200 hopper_scale_w8 at TP 1, 4, 8" in scale


def test_code_columns_are_targets_with_versions_in_order() -> None:
    table = code.table(told(made.mixed()).records)
    assert table.columns == (("gfx950", "3.6.0"), ("gfx950", "3.10.0"), ("h200", "3.4.0"),
                             ("h200", "3.6.0"), ("h200", "3.9.1"))  # fmt: skip
    moved = {m.name for m in table.metrics if m.changed}
    assert moved == {"instructions", "global_loads 4", "global_loads 16"}
    names = {m.name for m in table.metrics}
    assert names >= {"spills", "registers", "matrix wgmma", "global_loads 4", "global_loads 16"}
    for metric in table.metrics:  # never one model's code against another's
        cells = [cell[0].cell for cell in metric.cells if cell]
        assert len({(c["model"], c["tp_size"], c["experts"]) for c in cells}) == 1
    kernels = {m.kernel for m in table.metrics}
    assert kernels == {
        "mxfp4_triton w13 (strided + cdna4_scale)",
        "mxfp4_triton w13 (hopper_value_v3 + hopper_scale_w8), gpt_oss_120b · TP1 · E=16",
        "mxfp4_triton w13 (hopper_value_v3 + hopper_scale_w8), qwen3_235b · TP1 · E=16",
    }


def test_hostile_text_cannot_leave_its_place(run: Run) -> None:
    page = run("hostile")[1]
    html = page.read_text()
    assert html.count("<script") == 2
    assert html.count("</script>") == 2
    assert "<img" not in html
    block = html.split('id="data">', 1)[1].split("</script>", 1)[0]
    assert not set("<>&") & set(block)
    assert made.HOSTILE in json.loads(block)["pool"]
    markdown = (page.parent / "report.md").read_text()
    assert "<script" not in markdown
    assert "<img" not in markdown
    for line in markdown.splitlines():
        if line.startswith("| mxfp4_triton |"):
            assert len(re.findall(r"(?<!\\)\|", line)) == 4  # path, model and one square


@pytest.mark.parametrize("name", ["mixed", "empty", "interrupted", "unmeasured", "many"])
def test_markdown_says_what_the_page_says(run: Run, name: str) -> None:
    folder, page = run(name)
    text = (page.parent / "report.md").read_text()
    assert len(text) < 300_000
    found = facts.facts(load.load([folder]))
    assert plain(found.verdict).split("(")[0] in text
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if line.startswith("|---"):  # a table is one block whose lines have as many cells
            end = next(
                (j for j in range(i, len(lines)) if not lines[j].startswith("|")), len(lines)
            )
            bars = {len(re.findall(r"(?<!\\)\|", row)) for row in lines[i - 1 : end]}
            assert len(bars) == 1, lines[i - 1]


def test_several_runs_make_one_report(tmp_path: Path) -> None:
    one = made.write(tmp_path / "one", made.mixed()[:5])
    two = made.write(tmp_path / "two", made.unmeasured())
    loose = tmp_path / "rows.jsonl"
    loose.write_text((two / "rows.jsonl").read_text())
    page = report.write_report([one, two, loose], tmp_path / "out", with_figures=False)
    block = page.read_text().split('id="data">', 1)[1].split("</script>", 1)[0]
    data = json.loads(block)
    assert data["runs"] == ["one", "two", f"{tmp_path.name}/rows"]
    assert len(data["rows"]) == 5 + 5 + 5
    assert {row[0] for row in data["rows"]} == {0, 1, 2}


def test_a_folder_of_files_is_a_run_a_file_and_other_lines_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "h200"
    folder.mkdir()
    lines = [json.dumps(row) for row in made.bench()]
    (folder / "bench.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "layouts.jsonl").write_text('{"layout": "strided"}\n' * 3)
    runs = load.load([folder])
    assert [(run.name, len(run.records), run.others) for run in runs] == [
        ("h200/bench", len(lines), 0), ("h200/layouts", 0, 3)]  # fmt: skip
    assert ("other lines", "3 in these files are no rows and are not shown here") in facts.facts(
        runs
    ).about


def test_a_bench_row_holds_what_a_vendor_took(tmp_path: Path) -> None:
    found = told(made.bench())
    assert found.total == 3  # one cell, three cases
    pairs = evidence.pairs(found.records)
    gains = {(p.after.case, p.before.impl): p.ratio for p in pairs}
    vendor = "triton_kernels"
    assert gains == {("Hopper value", vendor): 50.0, ("CDNA4 scale", vendor): 20.0}
    assert pairs[0].src == "ratio:0:0:decisions.today.median_us/0:0:time.median_us"
    assert pairs[0].before.get("memory.peak_extra_bytes") == 9 << 30
    assert evidence.label(pairs[0].after).startswith("swizzle Hopper value · gpt_oss_120b · TP1")


def test_figures_are_drawn_light_dark_and_png_and_do_not_change(tmp_path: Path) -> None:
    folder = made.write(tmp_path / "run", made.mixed()[:9] + made.unmeasured())
    written = []
    for out in ("a", "b"):
        report.write_report([folder], tmp_path / out, with_figures=True)
        files = sorted((tmp_path / out / "figures").iterdir())
        written.append({path.name: path.read_bytes() for path in files})
    assert written[0] == written[1]
    names = {"states", "before_after", "copy_fraction", "experts", "targets"}
    assert set(written[0]) == {f"{n}{s}" for n in names for s in (".svg", "-dark.svg", ".png")}
    for name, content in written[0].items():
        if name.endswith(".svg"):
            ElementTree.fromstring(content)
            assert len(content) < 600_000
    assert written[0]["states.svg"] != written[0]["states-dark.svg"]


def test_the_command_writes_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made.write(tmp_path / "run", made.unmeasured())
    assert report.main([f"run={folder}", f"out={tmp_path / 'out'}", "figures=false"]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'out' / 'index.html'}\n"
    for argv in (["runs=x"], ["run="], ["run=x", "what"], ["layout"], ["run=x", "figures=no"]):
        with pytest.raises(UsageError):
            report.main(argv)


def test_readme_is_rewritten_from_rows_and_checked(tmp_path: Path) -> None:
    results, text = tmp_path / "results", "# x\n<!-- table:h200 -->\nold\n<!-- /table -->\nend\n"
    made.write(results / "h200", made.mixed())
    options = {"readme": str(tmp_path / "README.md"), "results": str(results),
               "reports": str(tmp_path / "reports"), "check": "true"}  # fmt: skip
    Path(options["readme"]).write_text(text)
    assert readme.main(options) == 1
    assert Path(options["readme"]).read_text() == text
    assert readme.main(options | {"check": "false"}) == 0
    assert readme.main(options) == 0
    new = Path(options["readme"]).read_text()
    assert new.startswith("# x\n<!-- table:h200 -->\n| routine or path |")
    assert new.endswith("<!-- /table -->\nend\n")
    assert "old" not in new
    assert "| `mxfp4_triton` | deepseek_r1_nvfp4, TP1, 128 experts | " in new
    Path(options["readme"]).write_text("no markers")
    with pytest.raises(UsageError, match="has no"):
        readme.main(options)


def test_the_repository_readme_agrees_with_its_rows() -> None:
    root = Path(__file__).resolve().parents[2]
    text = (root / "README.md").read_text()
    assert "<!-- table:h200 -->" in text and "<!-- figures:h200 -->" in text
    assert readme.rewritten(text, root / "results", Path("reports")) == text


def test_the_gallery_shows_the_whole_catalog_and_stays_small() -> None:
    html = gallery.render(catalog.LAYOUTS)
    assert len(html.encode()) < 3_000_000
    for name, layout in catalog.LAYOUTS.items():
        assert f'<article id="{name}"' in html
        assert all(alias in html for alias in layout.aliases)
    assert html.count('<svg class="layout"') > 20
    assert gallery.group_of("block_scale_128x4") == gallery.group_of("trtllm_w13_scale")


@pytest.mark.parametrize("name", report.PUBLISHED)
def test_a_published_report_is_of_its_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).resolve().parents[2]
    assert list((root / "results" / name).glob("*.jsonl")), f"results/{name} lost its rows"
    monkeypatch.chdir(root)
    fresh = report.publish(name, report.PUBLISHED[name], tmp_path, with_figures=False)
    published = root / "reports" / name / "index.html"
    assert published.read_text() == fresh.read_text(), "run: python -m harness report publish"


def test_the_published_gallery_is_of_this_catalog() -> None:
    published = Path(__file__).resolve().parents[2] / "reports" / "layouts" / "index.html"
    fresh = gallery.render(catalog.LAYOUTS)
    assert published.read_text() == fresh, "run: python -m harness report publish"
