"""The cells of a sweep: overrides in Hydra's grammar to a frozen config for every point of the
grid.

Axes that are not named take the default grid: every model, the target's own paths, TP 1, 2, 4, 8,
the reference. Config groups do not refer to each other, so each distinct choice of a group is
composed once, all groups' n-th choices in one go, and 10,000 cells cost a few dozen compositions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import Any

from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from harness import UsageError
from harness.plan import config
from harness.rows import CELL
from harness.run.reader import Checkpoint
from kernels.errors import LayoutError
from kernels.pads import FORMAT
from kernels.select import paths_for

ORDER = ("hw", "model", "path", "tp_size", "tp_rank", "ep_size", "experts", "impl", "env", "source")
DEFAULT_TP = (1, 2, 4, 8)
# Parts of a cell's identity only where they differ from these: plain cells keep plain names.
EXTRA = {"ep_rank": 0, "generation": "3.5", "num_warps": 8}
RUN_KEYS = (  # of the run, not of a cell
    "run_id", "out", "workers", "memory_gib", "report", "limit_s", "resume", "resume_force",
    "batches",
)  # fmt: skip

Variant = dict[str, Any]  # a top-level key's value: a group's config, or a number


@dataclass(frozen=True)
class Grid:
    """cells: frozen configs; `cell` in each is the identity that its row carries. run: RUN_KEYS."""

    cells: list[dict[str, Any]]
    run: dict[str, Any]
    overrides: list[str]


def plan(overrides: Sequence[str]) -> Grid:
    """The whole grid; UsageError, before anything runs, for what cannot be composed."""
    overrides = [text for text in overrides if not text.lstrip("+~").startswith("hydra")]
    parsed = config.parse(overrides)
    for one in parsed:
        config.resolve([one.input_line.split("=")[0] + "=null"] if one.is_sweep_override() else [])
    fixed = config.resolve([p.input_line for p in parsed if not p.is_sweep_override()])
    axes = [(p.key_or_group, _choices(p)) for p in parsed if p.is_sweep_override()]
    named = {p.key_or_group for p in parsed}
    base = config.plain(config.hydra_config([*fixed, *_hold(fixed, axes)]))
    config.check(base)
    if gone := set(config.Config.__annotations__) - {*base, "env", "timing"}:
        raise UsageError(f"~{min(gone)}: every cell needs {min(gone)}; give it a value instead")
    tops = _tops(axes, named, base)
    composed = _compose(fixed, tops, base)
    cells = [_finish(cell, overrides, named) for cell in _cells(base, composed, named)]
    if not cells:
        raise UsageError(_nothing_fits(base, composed))
    unique = {cell["key"]: cell for cell in cells}
    return Grid(list(unique.values()), {key: base[key] for key in RUN_KEYS}, list(overrides))


def freeze(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The cells as a manifest keeps them: each distinct group config once, cells pointing to it."""
    groups: dict[str, list[Any]] = {}
    place: dict[tuple[str, str], int] = {}
    out = []
    for cell in cells:
        entry = {}
        for key, value in cell.items():
            if isinstance(value, dict) and key != "cell":
                text = (key, json.dumps(value, sort_keys=True))
                if text not in place:
                    place[text] = len(groups.setdefault(key, []))
                    groups[key].append(value)
                value = place[text]
            entry[key] = value
        out.append(entry)
    return {"groups": groups, "cells": out}


def thaw(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The frozen config of every cell of a manifest, as `run_cell` takes it."""
    groups = manifest["groups"]
    return [
        {key: groups[key][value] if key in groups else value for key, value in entry.items()}
        for entry in manifest["cells"]
    ]


def _choices(override: Override) -> list[str]:
    """The values of one sweep override, as Hydra writes them; globs and aliases resolved."""
    group = override.key_or_group
    if isinstance(override.value(), Glob):
        if group not in config.groups():
            raise UsageError(f"{override.input_line}: glob() chooses options, and {group} has none")
        names: list[str] = override.value().filter(config.groups()[group])
    else:
        try:
            names = [str(text) for text in override.sweep_string_iterator()]
        except HydraException as error:  # interval(): it has no end of values
            raise UsageError(f"{override.input_line}: {error}") from None
    if not names:
        raise UsageError(f"{override.input_line}: no value left to sweep over")
    if group in config.groups():
        names = [config.option(group, name) for name in names]
    return list(dict.fromkeys(names))


def _hold(fixed: Sequence[str], axes: Sequence[tuple[str, list[str]]]) -> list[str]:
    """The first value of each axis, so that the base composes as the first cell does."""
    return [f"{key}={values[0]}" for key, values in axes]


def _tops(
    axes: Sequence[tuple[str, list[str]]], named: set[str], base: dict[str, Any]
) -> dict[str, list[list[str]]]:
    """Top-level key -> its variants, each a list of overrides: the product of the axes under it."""
    tops: dict[str, list[list[str]]] = {}
    for key, values in axes:
        top = key.split(".")[0].split("/")[0]
        lists = [[f"{key}={value}"] for value in values]
        tops[top] = [a + b for a, b in product(tops.get(top, [[]]), lists)]
    checkpoint = base["source"]["kind"] == "safetensors"
    if "model" not in named and not checkpoint:
        tops["model"] = [[f"model={name}"] for name in config.groups()["model"]]
    if "tp_size" not in named:
        tops["tp_size"] = [[f"tp_size={size}"] for size in DEFAULT_TP]
    if "path" not in named:
        tops["path"] = [[f"path={name}"] for name in FORMAT]
    return tops


def _compose(
    fixed: Sequence[str], tops: dict[str, list[list[str]]], base: dict[str, Any]
) -> dict[str, list[Any]]:
    """Top-level key -> the value of each of its variants."""
    done: dict[str, list[Any]] = {top: [] for top in tops}
    plain = {top for top in tops if not isinstance(base.get(top), dict)}
    for top in plain:
        done[top] = [_scalar(variant) for variant in tops[top]]
    groups = [top for top in tops if top not in plain]
    for turn in zip_longest(*(tops[top] for top in groups)):
        chosen = [text for variant in turn if variant for text in variant]
        whole = config.plain(config.hydra_config([*_without(fixed, chosen), *chosen]))
        config.check(whole)
        for top, variant in zip(groups, turn, strict=True):
            if variant is not None:
                done[top].append(whole[top])
    for top in plain:
        for value in done[top]:
            config.check({top: value})
    return done


def _without(fixed: Sequence[str], chosen: Sequence[str]) -> list[str]:
    keys = {text.split("=")[0] for text in chosen}
    return [text for text in fixed if text.split("=")[0] not in keys]


def _scalar(variant: list[str]) -> Any:
    (override,) = config.parse(variant)
    return override.value()


def _cells(
    base: dict[str, Any], composed: dict[str, list[Any]], named: set[str]
) -> Iterator[dict[str, Any]]:
    """Every combination, in reading order; without `path=`, only the paths that fit."""
    tops = sorted(composed, key=lambda top: (ORDER.index(top) if top in ORDER else len(ORDER), top))
    for values in product(*(composed[top] for top in tops)):
        cell = base | dict(zip(tops, values, strict=True))
        if cell["source"]["kind"] == "safetensors":
            cell = cell | {"model": _described(cell["source"])}
        if "path" not in named and not _fits(cell):
            continue
        yield cell


def _described(source: dict[str, Any]) -> dict[str, Any]:
    return Checkpoint.open(source["path"]).describe(source["layer"])


def _fits(cell: dict[str, Any]) -> bool:
    """Whether the target has the path, and a checkpoint the format that it starts from."""
    path = cell["path"]["name"]
    form = FORMAT[path]
    if cell["source"]["kind"] == "safetensors" and form != cell["model"]["format"]:
        return False
    try:
        return path in paths_for(cell["hw"]["arch"])
    except LayoutError as error:
        raise UsageError(str(error)) from None


def _nothing_fits(base: dict[str, Any], composed: dict[str, list[Any]]) -> str:
    """Why no default path is left: the checkpoint is of another format than the target takes."""
    targets = composed.get("hw", [base["hw"]])
    offers = "; ".join(f"{hw['name']} takes {', '.join(paths_for(hw['arch']))}" for hw in targets)
    form = _described(base["source"])["format"]
    return (
        f"the checkpoint is {form}, and no path from it fits: {offers}; name another hw= or a path="
    )


def _finish(cell: dict[str, Any], overrides: Sequence[str], named: set[str]) -> dict[str, Any]:
    """The frozen config of one cell: its experts settled, its identity, key and repro command."""
    model, size = cell["model"], cell["size"]
    for name, value in (
        *((key, cell[key]) for key in ("tp_size", "ep_size", "experts")),
        *((f"model.{key}", model[key]) for key in ("E", "H", "I")),
    ):
        if value is not None and value < 1:
            raise UsageError(f"{name}={value}: want at least 1")
    experts = cell["experts"] or min(size["experts"] or model["E"], model["E"])
    cell = {key: value for key, value in cell.items() if key not in RUN_KEYS}
    cell["experts"] = experts
    cell.setdefault("env", {"name": "current"})
    if "generation" not in named and cell["env"].get("generation"):
        cell["generation"] = cell["env"]["generation"]  # of the triton_kernels that the env holds
    label = lambda value: value["name"] if isinstance(value, dict) else value
    identity = {key: label(cell[key]) for key in CELL}
    identity |= {key: cell[key] for key, usual in EXTRA.items() if cell[key] != usual}
    if cell["source"]["kind"] == "safetensors":
        identity["layer"] = cell["source"]["layer"]
    if cell["impl"].get("import"):
        identity["import"] = cell["impl"]["import"]
    cell["cell"] = identity
    cell["key"] = " ".join(f"{key}={identity[key]}" for key in identity)
    cell["repro"] = _repro(cell, overrides)
    return cell


def _repro(cell: dict[str, Any], overrides: Sequence[str]) -> str:
    """The command that runs this cell alone."""
    skip = {"hw", "model", "path", "impl", "env", "tp_size", "experts", *RUN_KEYS}
    parts = [f"hw={cell['hw']['name']}"]
    if cell["source"]["kind"] != "safetensors":
        parts.append(f"model={cell['model']['name']}")
    parts += [f"path={cell['path']['name']}", f"tp_size={cell['tp_size']}"]
    parts += [f"experts={cell['experts']}", f"impl={cell['impl']['name']}"]
    if cell["env"]["name"] != "current":
        parts.append(f"env={cell['env']['name']}")
    for text in overrides:
        key = text.split("=")[0].lstrip("+~")
        if key in skip:
            continue
        top = cell.get(key.split(".")[0])
        here = top["name"] if isinstance(top, dict) and "." not in key else top
        inner = top.get(key.split(".", 1)[1]) if isinstance(top, dict) and "." in key else here
        value = text.split("=", 1)[1] if inner is None or isinstance(inner, dict) else inner
        parts.append(f"{key}={_quoted(value)}")
    return "python -m harness sweep " + " ".join(parts)


def _quoted(value: Any) -> str:
    """A value for Hydra inside a shell."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if text and all(c.isalnum() or c in "._-/:" for c in text):
        return (
            text
            if not text.replace(".", "").isdigit() or not isinstance(value, str)
            else f"\"'{text}'\""
        )
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return '"' + f"'{escaped}'".replace('"', '\\"').replace("$", "\\$").replace("`", "\\`") + '"'
