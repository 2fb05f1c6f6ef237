"""`python -m harness report`: a page, tables and figures of one run or several, from rows alone.

    python -m harness report run=latest                 reports/<run>/
    python -m harness report run=a,b out=reports/both   several runs as one
    python -m harness report run=results/h200           a folder of .jsonl files
    python -m harness report layouts                    reports/layouts/: pictures of the catalog
    python -m harness report readme                     tables and figures between README's markers
    python -m harness report publish                    all that is committed: the above, reports/*

Writes index.html (self-contained), report.md and figures/. The exit code is 0 if the report was
written: it says what the run established, the sweep and the gate judge it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness import UsageError, rows

if TYPE_CHECKING:
    from harness.report.load import Run

OPTIONS = {"run": "latest", "out": "", "title": "", "figures": "true"}
PUBLISHED = {"h200": "NVIDIA H200", "gfx950-vs-hopper": "gfx950 against Hopper"}
FIGURES = {"true": True, "false": False, "timed": None}


def write_report(
    runs: Sequence[str | Path],
    out: str | Path,
    title: str = "",
    with_figures: bool | None = None,
) -> Path:
    """Writes the report of `runs` (ids, folders or .jsonl files) into `out`; returns index.html.

    with_figures None: where a cell was timed. They take seconds, a page a fraction of one.
    """
    from harness.report import code, evidence, facts, findings, load, markdown, page

    loaded = load.load(runs)
    told = facts.facts(loaded)
    pairs, slopes = evidence.pairs(told.records), evidence.slopes(told.records)
    sides, metrics = evidence.targets(told.records), code.table(told.records)
    found = findings.findings(told, pairs, slopes, sides)
    title = title or ", ".join(run.name for run in loaded)
    commands = command(loaded)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    drawn: list[tuple[str, str]] = []
    if with_figures or (with_figures is None and any(r.row.get("time") for r in told.records)):
        from harness.report import figures

        drawn = figures.write(told, pairs, slopes, sides, out / "figures")
    data = page.packed(told, pairs, slopes, sides, metrics)
    html = page.render(told, title, found, data, commands)
    text = markdown.render(told, title, found, pairs, slopes, sides, metrics, drawn, commands)
    (out / "report.md").write_text(text, encoding="utf-8")
    index = out / "index.html"
    index.write_text(html, encoding="utf-8")
    return index


def publish(name: str, title: str, out: Path, with_figures: bool = True) -> Path:
    """The committed report of the rows in results/<name>."""
    return write_report([Path("results") / name], out, title, with_figures)


def of_run(folder: Path) -> Path:
    """The report of a run that has just ended: reports/<run>/, or beside rows kept elsewhere."""
    usual = folder.parent == rows.results_root()
    return write_report([folder], Path("reports") / folder.name if usual else folder / "report")


def command(loaded: Sequence[Run]) -> str:
    """The commands that made the runs, from their manifests, where they say so."""
    given = [run.manifest.get("overrides") for run in loaded]
    return "\n".join(
        f"python -m harness sweep {shlex.join(map(str, line))}" for line in given if line
    )


def main(argv: list[str]) -> int:
    """See the module's page."""
    if argv and argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    if argv and "=" not in argv[0]:
        return _other(argv[0], argv[1:])
    options = parse(argv, OPTIONS)
    if options["figures"] not in FIGURES:
        raise UsageError(f"report: figures={options['figures']}; known: {', '.join(FIGURES)}")
    names = [name for name in options["run"].split(",") if name]
    if not names:
        raise UsageError("report run=: name a run, or latest")
    first = rows.run_dir(names[0]) if names[0] == "latest" else Path(names[0])
    stems = [first.stem, *(Path(name).stem for name in names[1:])]
    joined = "+".join(rows.safe_name(name) for name in stems)
    out = options["out"] or Path("reports") / joined
    index = write_report(names, out, options["title"], FIGURES[options["figures"]])
    print(f"report: {index}")
    return 0


def parse(argv: Sequence[str], known: dict[str, str]) -> dict[str, str]:
    """key=value arguments over defaults; UsageError for anything else."""
    from harness import suggest

    options = dict(known)
    for argument in argv:
        key, equals, value = argument.partition("=")
        if not equals:
            raise UsageError(f"report: {argument!r} is no key=value")
        if key not in known:
            raise UsageError(f"report: no option {key!r}{suggest(key, list(known))}")
        options[key] = value
    return options


def _other(what: str, argv: list[str]) -> int:
    from harness import suggest

    if what == "layouts":
        from harness.report import gallery

        index = gallery.write(Path(parse(argv, {"out": "reports/layouts"})["out"]))
        print(f"report: {index}")
        return 0
    if what == "publish":
        for name, title in PUBLISHED.items():
            if list((Path("results") / name).glob("*.jsonl")):
                print(f"report: {publish(name, title, Path('reports') / name)}")
        return _other("layouts", []) or _other("readme", argv)
    if what == "readme":
        from harness.report import readme

        return readme.main(parse(argv, readme.OPTIONS))
    raise UsageError(
        f"report: no {what!r}{suggest(what, ['layouts', 'publish', 'readme', 'run='])}"
    )
