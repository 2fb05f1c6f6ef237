"""`python -m harness gate`: compare a run with a baseline, and fail on what got worse.

  gate baseline=NAME_OR_FILE [run=latest] [classes=exact,coverage,memory,time,codegen]
       [AXIS=VALUE,VALUE] [markdown=FILE] [junit=FILE] [LIMIT=NUMBER]
  gate accept baseline=NAME_OR_FILE why='...' [who=NAME] [run=latest] [classes=...] [AXIS=...]
  gate ab --base REV [--head REV] [only=ROUTINE,ROUTINE] [markdown=FILE] [junit=FILE] [LIMIT=NUMBER]
  gate selftest [out=FOLDER]

An AXIS (hw, model, path, tp_size, impl, ...) limits both sides to those cells. A LIMIT is a number
of conf/gate/default.yaml. Exit codes: 0 nothing got worse; 1 regression (time, memory, code);
2 wrong or changed bytes, layouts, decisions; 3 coverage lost, or nothing to compare; 4 usage or
harness error. When several hold, 2 goes before 3 and 3 before 1; the table lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from harness import ROOT, UsageError, rows, suggest
from harness.gate import baseline
from harness.gate import report as gate_report
from harness.gate.join import compare, exit_code
from harness.gate.rules import CLASSES, Finding, Limits
from harness.measure import stats

BASELINES = Path("results") / "baselines"
AXES = (*rows.CELL, "generation", "num_warps", "ep_rank")
EVIDENCE = {"memory": "memory", "time": "time", "codegen": "codegen"}  # class -> field of a row
COMMANDS: dict[str, str] = {"ab": "harness.gate.ab", "selftest": "harness.gate.selftest"}


def main(argv: list[str]) -> int:
    if any(a in ("-h", "--help", "help") for a in argv):
        print(__doc__)
        return 0
    if argv and argv[0] in COMMANDS:
        run: Callable[[list[str]], int] = import_module(COMMANDS[argv[0]]).main
        return run(argv[1:])
    if argv and argv[0] == "accept":
        return accept(options(argv[1:], ("baseline", "run", "classes", "who", "why")))
    return check(options(argv, ("baseline", "run", "classes", "markdown", "junit")))


def options(argv: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """KEY=VALUE arguments; UsageError for an unknown key, with the close ones."""
    allowed = [*known, *AXES, *LIMITS]
    out = {}
    for text in argv:
        key, equals, value = text.partition("=")
        if not equals or key not in allowed:
            raise UsageError(f"gate: cannot read {text!r}{suggest(key, allowed)}")
        out[key] = value
    return out


LIMITS = ("memory_rel", "memory_bytes", *(f.name for f in fields(stats.Rule)))


def limits(given: Mapping[str, str]) -> Limits:
    """conf/gate/default.yaml with what the command line says instead."""
    from omegaconf import OmegaConf

    values: dict[str, Any] = dict(OmegaConf.load(ROOT / "conf" / "gate" / "default.yaml"))
    for name in LIMITS:
        if name in given:
            try:
                values[name] = type(values[name])(given[name])
            except ValueError:
                raise UsageError(f"gate: {name}={given[name]!r} is not a number") from None
    rule = {f.name: values.pop(f.name) for f in fields(stats.Rule)}
    return Limits(**values, rule=stats.Rule(**rule))


def baseline_path(name: str) -> Path:
    """A file, or the name of one in results/baselines."""
    if "/" in name or ".jsonl" in name:
        return Path(name)
    packed = BASELINES / f"{name}.jsonl.gz"
    return packed if packed.is_file() else BASELINES / f"{name}.jsonl"


def chosen(text: str | None) -> tuple[str, ...]:
    classes = tuple((text or ",".join(CLASSES)).split(","))
    for name in classes:
        if name not in CLASSES:
            raise UsageError(f"gate: no class {name!r}{suggest(name, list(CLASSES))}")
    return classes


def only(found: Iterable[rows.Row], given: Mapping[str, str]) -> list[rows.Row]:
    """The rows whose cells have one of the values asked for on each axis asked for."""
    wanted = {a: given[a].split(",") for a in AXES if a in given}
    return [r for r in found if all(str(r["cell"].get(a)) in v for a, v in wanted.items())]


def check(given: Mapping[str, str]) -> int:
    """Compare, print, write the files asked for, and give the exit code."""
    if "baseline" not in given:
        names = ", ".join(sorted(p.name for p in BASELINES.glob("*.jsonl*"))) or "none yet"
        raise UsageError(f"gate: baseline=NAME_OR_FILE is missing; there are: {names}")
    header, old = baseline.load(baseline_path(given["baseline"]))
    old, new = only(old, given), only(baseline.load_run(given.get("run", "latest")), given)
    classes = chosen(given.get("classes") or ",".join(header.get("classes", CLASSES)))
    findings, compared = compare(old, new, limits(given), classes)
    code, line = verdict(old, new, findings, compared)
    finish(findings, line, header, [r["cell"] for r in old], given)
    return code


def verdict(
    old: Sequence[rows.Row],
    new: Sequence[rows.Row],
    findings: Sequence[Finding],
    compared: Mapping[str, int],
) -> tuple[int, str]:
    """(exit code, sentence). Having nothing to compare is a failure, in whole or for a class."""
    code = exit_code(findings)
    if not old or not new:
        side = "the baseline has no cells" if not old else "the run has no rows"
        return 3, f"gate: nothing to compare (exit 3): {side}"
    if not any(r["status"] == "ok" for r in new) and code != 2:
        return 3, f"gate: nothing was verified (exit 3): none of the run's {len(new)} cells is ok"
    empty = [
        kind
        for kind, n in compared.items()
        if n == 0 and any(r.get(EVIDENCE.get(kind, "status")) for r in old)
    ]
    if empty and code in (0, 1):
        why = next((f"; {f.sentence}" for f in findings if f.verdict == "NOT_COMPARABLE"), "")
        return 3, (
            f"gate: nothing to compare (exit 3) in class {', '.join(empty)}{why}; "
            "leave a class out with classes="
        )
    return code, gate_report.summary(findings, compared, code)


def finish(
    findings: Sequence[Finding],
    line: str,
    header: Mapping[str, Any],
    cells: Iterable[Mapping[str, Any]],
    given: Mapping[str, str],
) -> None:
    """The table and the sentence on the terminal, and the files asked for."""
    if "markdown" in given:
        with Path(given["markdown"]).open("a") as file:  # a job summary is appended to
            file.write(gate_report.markdown(findings, line, header))
    if "junit" in given:
        gate_report.write_junit(Path(given["junit"]), gate_report.junit(findings, cells, line))
    gate_report.show(findings, line)


def accept(given: Mapping[str, str]) -> int:
    """Write the run's rows as the new baseline, and say what that changes."""
    if "baseline" not in given:
        raise UsageError("gate accept: baseline=NAME_OR_FILE is missing")
    path, run = baseline_path(given["baseline"]), given.get("run", "latest")
    new = only(baseline.load_run(run), given)
    classes = chosen(given.get("classes"))
    if "classes" not in given:  # a class without evidence would fail every later gate
        classes = tuple(c for c in classes if any(r.get(EVIDENCE.get(c, "status")) for r in new))
    if path.is_file():
        findings, compared = compare(baseline.load(path)[1], new, limits(given), classes)
        code = exit_code(findings)
        gate_report.show(
            findings,
            gate_report.summary(findings, compared, code).replace(
                "gate:", "against the old baseline:"
            ),
        )
    header = baseline.save(
        path,
        new,
        classes,
        why=given.get("why", ""),
        who=given.get("who") or baseline.git("config", "user.name") or "",
    )
    print(f"accepted: {path}, {header['cells']} cells, {', '.join(header['classes'])}")
    return 0
