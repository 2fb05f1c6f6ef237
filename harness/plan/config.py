"""Hydra's config as a checked value: composes `conf/`, resolves aliases, answers unknown names.

The types below are the schema. They are plain dicts with known keys (`impl.import` is a key that no
class attribute could be), so that a cell's config is JSON and pickles as it is. Every yaml under
`conf/` composes and passes in tests/test_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, TypedDict, Union, get_args, get_origin, get_type_hints

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from harness import ROOT, UsageError, suggest
from harness.env import plugins
from harness.plan.routines import ROUTINES

CONF = ROOT / "conf"


class Hw(TypedDict):
    name: str
    platform: Literal["cuda", "rocm", "cpu"]
    arch: str
    warp_size: int
    hbm_bytes_per_s: float | None
    llc_bytes: int | None
    aliases: list[str]
    source: str


class Model(TypedDict):
    name: str
    E: int
    H: int
    I: int
    activation: str
    format: Literal["mxfp4", "nvfp4"]
    top_k: int
    aliases: list[str]
    source: str


class Path_(TypedDict):
    name: str
    kind: Literal["layer", "routine"]
    format: Literal["mxfp4", "nvfp4", "bf16", "any"]
    source: str


Impl = TypedDict(
    "Impl", {"name": str, "kind": Literal["own", "vendor", "import"], "import": str | None}
)


class Size(TypedDict):
    name: str
    experts: int | None


class Source(TypedDict):
    name: str
    kind: Literal["synthetic", "safetensors"]
    path: str | None
    layer: int


class Config(TypedDict, total=False):
    hw: Hw
    model: Model
    path: Path_
    impl: Impl
    size: Size
    source: Source
    env: dict[str, Any]
    timing: dict[str, Any]
    tp_size: int
    tp_rank: int
    ep_size: int
    ep_rank: int
    experts: int | None
    seed: int
    generation: Literal["3.5", "3.8"]
    num_warps: Literal[4, 8]
    judge: bool
    codegen: bool
    run_id: str | None
    out: str
    workers: int | None
    memory_gib: float | None
    report: bool
    limit_s: float | None
    resume: str | None
    resume_force: bool
    batches: int | None


def _check(value: Any, kind: Any, where: str) -> None:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any or origin is dict:
        pass
    elif origin in (UnionType, Union):
        if value is not None or NoneType not in inner:
            _check(value, next(k for k in inner if k is not NoneType), where)
    elif origin is Literal:
        if value not in inner or isinstance(value, bool):
            raise UsageError(f"{where}={value!r}{suggest(str(value), [str(k) for k in inner])}")
    elif origin is list:
        if not isinstance(value, list):
            raise UsageError(f"{where}={value!r} should be a list")
        for item in value:
            _check(item, inner[0], where)
    elif hasattr(kind, "__required_keys__"):
        check(value, kind, where)
    else:
        good = (int, float) if kind is float else (kind,)
        if not isinstance(value, good) or (isinstance(value, bool) and kind is not bool):
            raise UsageError(f"{where}={value!r} should be of type {kind.__name__}")


@cache
def _hints(schema: Any) -> dict[str, Any]:
    return get_type_hints(schema)


@cache
def _grammar() -> OverridesParser:
    """Hydra's parser, made once: its table of functions takes 0.3 ms, for 10,000 overrides 3 s."""
    return OverridesParser.create()


def check(values: Any, schema: Any = Config, where: str = "") -> None:
    """UsageError naming the key when `values` is not as the schema says."""
    if not isinstance(values, Mapping):
        raise UsageError(f"{where}={values!r} should be a group of values")
    hints = _hints(schema)
    for name in values:
        if name not in hints:
            raise UsageError(f"no config key {_dot(where, name)}{suggest(str(name), list(hints))}")
    for name, kind in hints.items():
        if name in values:
            _check(values[name], kind, _dot(where, name))
        elif name in schema.__required_keys__:
            raise UsageError(f"config key {_dot(where, name)} is missing")


def _dot(where: str, name: object) -> str:
    return f"{where}.{name}" if where else str(name)


def _store_routines() -> None:
    """Each routine is a path by its own name, each entry point an impl, without a file."""
    store = ConfigStore.instance()
    for name in ROUTINES:
        store.store(group="path", name=name, node=group_config("path", name))
    for name in plugins.found():
        store.store(group="impl", name=name, node={"name": name, "kind": "vendor", "import": None})


@lru_cache(maxsize=1)
def groups() -> dict[str, list[str]]:
    """Config group -> its options, sorted."""
    found = {
        folder.name: sorted(p.stem for p in folder.glob("*.yaml"))
        for folder in sorted(CONF.iterdir())
        if folder.is_dir() and folder.name not in ("hydra", "__pycache__")
    }
    found["path"] = [*found["path"], *sorted(ROUTINES)]
    found["impl"] = sorted({*found["impl"], *plugins.found()})
    return found


def group_config(group: str, name: str) -> dict[str, Any]:
    """One option's values, as its yaml or the table of routines has them."""
    if group == "path" and name in ROUTINES:
        return {"name": name, "kind": "routine", "format": ROUTINES[name].format,
                "source": ROUTINES[name].source}  # fmt: skip
    loaded = OmegaConf.load(CONF / group / f"{name}.yaml")
    values: dict[str, Any] = OmegaConf.to_container(loaded, throw_on_missing=False)
    return values


_store_routines()


@lru_cache(maxsize=1)
def aliases() -> dict[str, dict[str, str]]:
    """Config group -> alias -> option."""
    out: dict[str, dict[str, str]] = {}
    for group in ("hw", "model"):
        for name in groups()[group]:
            named = group_config(group, name).get("aliases", [])
            out.setdefault(group, {}).update({str(alias): name for alias in named})
    return out


def option(group: str, name: str) -> str:
    """The option that a name or alias of a group stands for; UsageError with the close matches."""
    known = groups()[group]
    if name in known:
        return name
    named = aliases().get(group, {})
    if name.lower() in named:
        return named[name.lower()]
    close_to = [*known, *named]
    raise UsageError(f"no {group} {name!r}{suggest(name, close_to)}")


def parse(overrides: Sequence[str]) -> list[Override]:
    """Hydra's grammar; UsageError with what is wrong with which override."""
    out = []
    for text in overrides:
        if "=" not in text and not text.startswith("~"):
            raise UsageError(f"{text!r} is no override; write KEY=VALUE, for example hw=b200")
        try:
            out.append(_grammar().parse_override(text))
        except HydraException as error:
            raise UsageError(f"{text!r} is not in Hydra's grammar: {_first(error)}") from None
    return out


def _first(error: Exception) -> str:
    return " ".join(str(error).split("\nSee ")[0].split())


def hydra_config(overrides: Sequence[str]) -> DictConfig:
    """Composes without the schema check; Hydra's complaints as a UsageError."""
    try:
        if GlobalHydra.instance().is_initialized():
            return hydra_compose("config", list(overrides))
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return hydra_compose("config", list(overrides))
    except UsageError:
        raise
    except Exception as error:  # its own, OmegaConf's, and what slips through both
        raise UsageError(f"Hydra cannot compose this: {_first(error)}") from None


def plain(config: DictConfig) -> dict[str, Any]:
    """The config as a plain dict; UsageError for a value that is still `???`."""
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise UsageError(f"{missing[0]} has no value; add {missing[0]}=VALUE")
    out: dict[str, Any] = OmegaConf.to_container(config, resolve=True)
    return out


def resolve(overrides: Sequence[str]) -> list[str]:
    """The overrides with aliases resolved; an unknown key or option is a UsageError."""
    known = [*groups(), *get_type_hints(Config)]
    out = []
    for text, parsed in zip(overrides, parse(overrides), strict=True):
        top = parsed.key_or_group.split(".")[0].split("/")[0]
        if top not in known and top != "hydra":
            raise UsageError(f"no axis or config key {top!r}{suggest(top, sorted(set(known)))}")
        plain_choice = parsed.key_or_group in groups() and not parsed.is_sweep_override()
        if plain_choice and isinstance(parsed.value(), str):
            text = f"{parsed.key_or_group}={option(parsed.key_or_group, parsed.value())}"
        out.append(text)
    return out


def compose(overrides: Sequence[str]) -> DictConfig:
    """One config, checked: `compose(["hw=mi355x", "tp_size=2"]).hw.arch == "gfx950"`."""
    config = hydra_config(resolve(overrides))
    check(plain(config))
    return config
