"""What two targets, or two layouts on one, mean for the same weights: layouts, bytes, code, advice.

    python -m harness compare hw=gfx950,h200 model=gpt_oss_120b tp_size=1,2,4,8
    python -m harness compare hw=gfx950 variant=cdna4,strided
    python -m harness compare env=A,B …   and   impl=A,B …      (see compare_env)
    python -m harness compare measure=consumer   (times Hopper's, see consumer_time)

No device is needed. Per target and TP size: the value and scale layout that MXFP4 weights take and
the rule that says so, what padding adds, the bytes preparation moves with their datasheet bound,
and the code: of the consumer with the layout and without, and of the preparing kernels. A time
stands only beside the device it was measured on. out=FOLDER also writes compare.md and
compare.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import ROOT, UsageError, suggest
from harness.check import consumers
from harness.codegen import compiler as codegen
from harness.codegen import preparers
from harness.codegen import rules as codegen_gate
from harness.codegen.chips import CHIPS
from harness.compare import tables as compare_show
from harness.plan import config
from kernels import select
from kernels.catalog import LAYOUTS, find
from kernels.errors import LayoutError
from kernels.fused.consume import MX_GROUP
from kernels.layout import Layout
from kernels.shard import plan

USAGE = (
    "usage: python -m harness compare hw=A,B [model=M] [tp_size=1,2,4,8] [experts=N] [out=FOLDER]\n"
    "       python -m harness compare hw=A variant=LAYOUT,LAYOUT …\n"
    "       python -m harness compare env=A,B | impl=A,B | measure=consumer …"
)
KEYS = ("hw", "model", "tp_size", "variant", "experts", "out", "generation", "num_warps")
# What an engineer asks first about a consumer's code.
ORDER = ("matrix", "scale_path", "spills", "occupancy", "global reads", "instructions")
MEASURED = ROOT / "results" / "measured"


def main(argv: list[str]) -> int:
    """Exit 0 with a comparison printed, 4 for a command that cannot be read, 3 if no code could be
    made."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 4
    options = parse(argv)
    if any("," in options.get(axis, "") for axis in ("env", "impl")):
        from harness.compare import versions as compare_env

        return compare_env.main(argv)
    if measure := options.get("measure"):
        if measure != "consumer":
            raise UsageError(f"measure={measure!r}{suggest(measure, ['consumer'])}")
        from harness.measure import consumer_time

        return consumer_time.main(options)
    unknown = [name for name in options if name not in KEYS]
    if unknown:
        raise UsageError(f"no option {unknown[0]!r}{suggest(unknown[0], list(KEYS))}")
    found = compare(options)
    compare_show.terminal(found)
    if out := options.get("out"):
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "compare.json").write_text(json.dumps(found, indent=1) + "\n")
        (folder / "compare.md").write_text(compare_show.markdown(found))
        print(f"written: {out}/compare.json, {out}/compare.md")
    return 3 if all("error" in r for t in found["targets"] for r in t["code"].values()) else 0


def parse(argv: Sequence[str]) -> dict[str, str]:
    """key=value words; UsageError for a word that is none."""
    bad = [word for word in argv if "=" not in word]
    if bad:
        raise UsageError(f"{bad[0]!r} is no key=value; {USAGE}")
    return dict(word.split("=", 1) for word in argv)


def compare(options: Mapping[str, str]) -> dict[str, Any]:
    """The whole comparison as JSON: {"model", "targets": [...], "advice": [...], "triton"}."""
    names = _split(options.get("hw", "b200,h200"))
    variants = _split(options.get("variant", ""))
    if len(names) < 2 and not variants:
        raise UsageError(f"one target and no variant: nothing to compare; {USAGE}")
    hws = [config.group_config("hw", config.option("hw", name)) for name in names]
    model = config.group_config(
        "model", config.option("model", options.get("model", "gpt_oss_120b"))
    )
    tp_sizes = [_number("tp_size", text) for text in _split(options.get("tp_size", "1,2,4,8"))]
    experts = _number("experts", options["experts"]) if "experts" in options else int(model["E"])
    targets = [_target(hw, model, tp_sizes, experts, variants, options) for hw in hws]
    _compile(targets)
    for target in targets:
        target["measured"] = measured(target["hw"], model["name"])
    return {
        "model": {k: model[k] for k in ("name", "E", "H", "I", "activation", "source")},
        "experts": experts, "tp_sizes": tp_sizes, "triton": codegen.triton_version(),
        "targets": targets, "advice": [compare_show.advice(t) for t in targets],
    }  # fmt: skip


def _target(
    hw: Mapping[str, Any], model: Mapping[str, Any], tp_sizes: Sequence[int], experts: int,
    variants: Sequence[str], options: Mapping[str, str],
) -> dict[str, Any]:  # fmt: skip
    """Everything about one target but its code: layouts and bytes for each TP size."""
    arch = hw["arch"]
    if arch not in CHIPS:
        raise UsageError(f"hw={hw['name']}: no compiler target{suggest(hw['name'], sorted(CHIPS))}")
    chosen = {
        tp: select.choose_mxfp4(
            arch, tp, num_warps=int(options.get("num_warps", 8)),
            generation=options.get("generation", "3.5"),
        )
        for tp in tp_sizes
    }  # fmt: skip
    rows = [_row(hw, model, tp, experts, choice) for tp, choice in chosen.items()]
    pairs = {f"{c.value.name} + {c.scale.name}": (c.value, c.scale) for c in chosen.values()}
    strided = LAYOUTS["strided"]
    first = next(iter(chosen.values()))
    if variants:
        pairs = {name: _variant(name, first) for name in variants}
    else:
        pairs.setdefault("strided + strided", (strided, strided))
    _, size = next(iter(consumers.shapes(model, tp_sizes[0]).items()))
    launches, refused = {}, {}
    for name, (value, scale) in pairs.items():
        try:
            launches[name] = consumers.launch(arch, value, scale, size[0], size[1])
        except LayoutError as error:
            refused[name] = {"error": str(error)}
    return {
        "preparing_launches": {
            layout.name: preparers.launch(layout, size[0], size[1] // per, arch)
            for pair in pairs.values()
            for layout, per in zip(pair, (2, MX_GROUP), strict=True)
            if not layout.is_plain
        },
        "hw": hw["name"], "arch": arch, "hbm_bytes_per_s": hw["hbm_bytes_per_s"],
        "datasheet": hw["source"], "rows": rows, "code": refused, "preparing": {},
        "launches": launches,
        "code_shape": {"matrix": "w13", "n": size[0], "k": size[1], "m": 128},
        "x_format": consumers.CONFIG[arch]["x_format"],
    }  # fmt: skip


def _row(
    hw: Mapping[str, Any], model: Mapping[str, Any], tp: int, experts: int, choice: select.Choice
) -> dict[str, Any]:
    """One TP size: layouts, reason, padding and preparation bytes of a rank, all experts."""
    shard = plan(
        "mxfp4_triton", hw["arch"], experts=experts, hidden=model["H"], intermediate=model["I"],
        activation=model["activation"], tp_size=tp,
    )  # fmt: skip
    useful = stored = 0
    for n, k, rows, cols in (
        (shard.parts * shard.per_rank, model["H"],
         shard.parts * shard.padded_intermediate, shard.padded_hidden),
        (model["H"], shard.per_rank, shard.padded_hidden, shard.padded_intermediate),
    ):  # fmt: skip
        useful += n * (k // 2 + -(-k // MX_GROUP))
        stored += _bytes(choice.value, rows, cols // 2) + _bytes(
            choice.scale, rows, cols // MX_GROUP
        )
    useful, stored = experts * useful, experts * stored
    rate = hw["hbm_bytes_per_s"]
    return {
        "tp_size": tp, "value": choice.value.name, "scale": choice.scale.name,
        "reason": choice.reason, "source": choice.source, "warning": choice.warning,
        "constraints": dict(choice.constraints), "outcome": shard.outcome,
        "padding_reason": shard.reason,
        "useful_bytes": useful, "stored_bytes": stored, "padded_bytes": stored - useful,
        "overhead": round(stored / useful, 4), "preparation_bytes": useful + stored,
        "bound_us": round((useful + stored) / rate * 1e6, 1) if rate else None,
    }  # fmt: skip


def _bytes(layout: Layout, n: int, k: int) -> int:
    rows, cols = layout.storage_shape(n, k)
    return rows * cols


def _variant(name: str, choice: select.Choice) -> tuple[Layout, Layout]:
    """A variant's (value, scale): `strided`, `chosen`, or a scale layout by any of its names."""
    strided = LAYOUTS["strided"]
    if name in ("strided", "linear"):
        return strided, strided
    if name == "chosen":
        return choice.value, choice.scale
    layout = find(name)
    return (choice.value if choice.value.bits and "hopper" in layout.name else strided), layout


def _compile(targets: Sequence[dict[str, Any]]) -> None:
    """The consumers' and the preparing code for every target, and what the gate's rules say of
    strided against chosen."""
    kinds = {"code": "launches", "preparing": "preparing_launches"}
    work = [
        (target[kind], name, launch, target["arch"])
        for target in targets
        for kind, launches in kinds.items()
        for name, launch in target.pop(launches).items()
    ]
    records = codegen.compile_many([(launch, arch) for *_, launch, arch in work], errors=True)
    for (into, name, *_), record in zip(work, records, strict=True):
        into[name] = record
    for target in targets:
        names = list(target["code"])
        left, right = target["code"][names[-1]], target["code"][names[0]]
        if len(names) < 2 or "error" in left or "error" in right:
            target["moved"] = []
            continue
        found = codegen_gate.compare_codegen(
            {"target": target["arch"], "triton": left["triton"], "kernels": {"consumer": left}},
            {"target": target["arch"], "triton": right["triton"], "kernels": {"consumer": right}},
        )
        text = lambda s: s.split(": ", 1)[1].replace("; pin the baseline again", "")
        target["moved"] = [
            {"better": f.verdict == "FASTER", "what": f.what,
             "sentence": text(f.sentence).replace("(was ", f"({_short(names[-1])}: ")}
            for f in sorted(found, key=_first_asked)
        ]  # fmt: skip


def _first_asked(found: codegen_gate.Finding) -> int:
    return ORDER.index(found.what) if found.what in ORDER else len(ORDER)


def _short(pair: str) -> str:
    """strided + strided -> strided."""
    return " + ".join(dict.fromkeys(pair.split(" + ")))


def measured(hw: str, model: str) -> list[dict[str, Any]]:
    """Committed consumer times of this very device kind and model; empty where none was taken."""
    found = []
    for path in sorted(MEASURED.glob("consumer_*.json")):
        result = json.loads(path.read_text())
        if result["hw"] == hw:
            keep = {k: result[k] for k in ("device", "torch", "triton")}
            found += [line | keep for line in result["break_even"] if line["model"] == model]
    return found


def _split(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _number(name: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"{name}={text!r}: want whole numbers of at least 1")
    return int(text)
