"""Version environments, the axis `env=`: build them, say what each holds, remove them.

    python -m harness env sync env=triton36,tk38     python -m harness env check
    python -m harness env list                       python -m harness env remove env=triton36

An env (`conf/env/NAME.yaml`) is a set of exactly pinned wheels laid over the running interpreter's
packages: each wheel is unpacked once into a folder of its own under the cache, and a worker process
(`env_worker`) puts the folders of its env before site-packages. torch stays the interpreter's;
another torch is another interpreter, `env.python=PATH`. Wheels are locked by sha256 in
conf/env/lock.json, which pip enforces. `take` keeps only some folders of a large wheel. The cache
is $FP4_MOE_ENVS, else fp4-moe-layouts/envs under the user's cache folder; `env remove` deletes from
it what no other synced env uses. An env that cannot be had is an error that names the wheel; a
sweep makes rows of it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from harness import ROOT, UsageError, suggest

CONF = ROOT / "conf" / "env"
LOCK = CONF / "lock.json"
USAGE = "usage: python -m harness env sync|check|remove|list|lock [env=NAME,NAME] [env.python=PATH]"


class EnvError(UsageError):
    """An env that cannot be built or started; the message says which wheel or import, and why."""


@dataclass(frozen=True)
class Package:
    """One folder of the overlay: a pinned wheel, or wheels that share an import package. take:
    folder in the wheel -> folder in the overlay; empty: all of it."""

    pins: tuple[str, ...]
    take: tuple[tuple[str, str], ...] = ()

    @property
    def pin(self) -> str:
        return " + ".join(self.pins)


@dataclass(frozen=True)
class Env:
    """A named set of wheels over an interpreter; `current` has none."""

    name: str
    packages: tuple[Package, ...] = ()
    python: str = sys.executable
    note: str = ""

    @cached_property
    def tag(self) -> str:
        """The interpreter's wheel tag, such as cp311."""
        if self.python == sys.executable:
            return f"cp{sys.version_info[0]}{sys.version_info[1]}"
        ask = "import sys; print('cp%d%d' % sys.version_info[:2])"
        try:
            out = subprocess.run(
                [self.python, "-c", ask], capture_output=True, text=True, timeout=60
            )
        except OSError as error:
            raise EnvError(f"env.python={self.python} cannot be run: {error}") from None
        if out.returncode:
            raise EnvError(f"env.python={self.python} cannot be run: {out.stderr.strip()[-200:]}")
        return out.stdout.strip()

    def folders(self) -> tuple[Path, ...]:
        """Where each package's overlay is, or will be, in the order of sys.path."""
        return tuple(_folder(package, self.tag) for package in self.packages)

    def missing(self) -> list[Package]:
        pairs = zip(self.packages, self.folders(), strict=True)
        return [package for package, folder in pairs if not folder.is_dir()]

    def path(self) -> list[str]:
        """sys.path entries of the overlays; a package may keep its modules one folder down."""
        out = []
        for folder in self.folders():
            inner = (
                folder / "nvidia_cutlass_dsl" / "dsl_packages"
            )  # what that wheel's .pth would add
            out += [str(p) for p in (inner, folder) if p.is_dir()]
        return out


def names() -> list[str]:
    return sorted(path.stem for path in CONF.glob("*.yaml"))


def load(name: str, python: str | None = None) -> Env:
    """The env of conf/env/NAME.yaml; UsageError with close matches for an unknown name."""
    path = CONF / f"{name}.yaml"
    if not path.is_file():
        raise UsageError(f"no env {name!r}{suggest(name, names())}")
    conf: Any = OmegaConf.to_container(OmegaConf.load(path))
    packages = []
    for pins in conf["packages"]:
        name_of = pins.partition("==")[0]
        packages.append(
            Package(tuple(pins.split(" + ")), tuple(conf["take"].get(name_of, {}).items()))
        )
    for other in conf.get("with", []):
        packages += load(other).packages
    where = python or conf["python"] or sys.executable
    return Env(name, tuple(dict.fromkeys(packages)), where, conf["note"])


def cache_dir() -> Path:
    """$FP4_MOE_ENVS, else the user's cache folder."""
    if given := os.environ.get("FP4_MOE_ENVS"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "fp4-moe-layouts" / "envs"


def lock() -> dict[str, dict[str, str]]:
    """{pin: {wheel tag or `any`: sha256}}."""
    loaded: dict[str, dict[str, str]] = json.loads(LOCK.read_text())
    return loaded


def _hash(pin: str, tag: str) -> str:
    hashes = lock().get(pin, {})
    if found := hashes.get(tag) or hashes.get("any"):
        return found
    known = ", ".join(hashes) or "none"
    raise EnvError(f"{pin} is not locked for {tag} (locked: {known}); run: env lock")


def _folder(package: Package, tag: str) -> Path:
    parts = f"{[_hash(pin, tag) for pin in package.pins]} {package.take}"
    name = package.pins[0].replace("==", "-")
    return cache_dir() / f"{name}-{sha256(parts.encode()).hexdigest()[:12]}"


def sync(env: Env, say: Any = print) -> float:
    """Downloads and unpacks what the cache lacks; seconds spent. EnvError names the wheel that
    failed."""
    start = time.monotonic()
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / ".lock").open("w") as held:  # of two at once, one downloads and one waits
        fcntl.flock(held, fcntl.LOCK_EX)
        for package in env.missing():
            say(f"{env.name}: {package.pin}")
            _install(package, env)
    if env.packages:
        marker = cache_dir() / "synced" / f"{env.name}.{env.tag}.json"
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.write_text(json.dumps([folder.name for folder in env.folders()]))
    return time.monotonic() - start


def _pip(env: Env, *args: str, timeout: float = 900) -> None:
    """The env's pip, else this interpreter's told which Python to fetch for."""
    command = [sys.executable, "-m", "pip", *args, "--disable-pip-version-check", "-q"]
    if env.tag != f"cp{sys.version_info[0]}{sys.version_info[1]}":
        command += ["--python-version", env.tag[2:3] + "." + env.tag[3:], "--implementation", "cp"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise EnvError(f"pip did not finish in {timeout:.0f} s") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise EnvError("; ".join(errors)[:400] or done.stderr.strip()[-400:] or "pip failed")


def _install(package: Package, env: Env) -> None:
    """A package into its overlay folder, whole or not at all (a rename ends it)."""
    folder = _folder(package, env.tag)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".sync-") as work:
        wanted = Path(work) / "wanted.txt"
        lines = (f"{pin} --hash=sha256:{_hash(pin, env.tag)}\n" for pin in package.pins)
        wanted.write_text("".join(lines))
        wheels, site = Path(work) / "wheels", Path(work) / "site"
        exact = ("--no-deps", "--only-binary=:all:", "--require-hashes", "-r", str(wanted))
        try:
            _pip(env, "download", *exact, "-d", str(wheels))
        except EnvError as error:
            raise EnvError(f"env {env.name}: {package.pin}: {error}") from None
        for wheel in sorted(wheels.glob("*.whl")):
            unpack(wheel, site, package.take)
        site.rename(folder)


def unpack(wheel: Path, site: Path, take: Iterable[tuple[str, str]] = ()) -> None:
    """A wheel's importable files; with `take`, only Python files and METADATA of those folders,
    renamed."""
    take = sorted(take, key=lambda pair: -len(pair[0]))  # the longest folder that matches wins
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            name = member.filename
            if ".data/" in name:  # scripts and headers are not imported; purelib and platlib are
                kind, _, rest = name.split(".data/", 1)[1].partition("/")
                name = rest if kind in ("purelib", "platlib") else ""
            for source, target in take:
                if name.startswith(source + "/"):
                    name = target + name[len(source) :]
                    break
            else:
                name = "" if take else name
            if not name or member.is_dir() or (take and not name.endswith((".py", "/METADATA"))):
                continue
            path = site / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source_file, path.open("wb") as out:
                shutil.copyfileobj(source_file, out, 1 << 20)
            if (mode := member.external_attr >> 16) & 0o111:  # ptxas and friends
                path.chmod(mode & 0o777)


def remove(env: Env) -> list[str]:
    """Deletes the env's overlays that no other synced env uses; their names."""
    markers = cache_dir() / "synced"
    for marker in markers.glob(f"{env.name}.*.json"):
        mine = json.loads(marker.read_text())
        marker.unlink()
        others = {
            name for other in markers.glob("*.json") for name in json.loads(other.read_text())
        }
        gone = [name for name in mine if name not in others and (cache_dir() / name).is_dir()]
        for name in gone:
            shutil.rmtree(cache_dir() / name)
        return gone
    return []


def _arguments(argv: list[str]) -> tuple[list[Env], Mapping[str, str]]:
    given = {}
    for word in argv:
        key, equals, value = word.partition("=")
        if not equals or key not in ("env", "env.python"):
            raise UsageError(f"{word!r}: {USAGE}")
        given[key] = value
    chosen = given.get("env", "all").split(",")
    if chosen == ["all"]:
        chosen = names()
    envs = [load(name, given.get("env.python")) for name in chosen]
    return envs, given


def main(argv: list[str]) -> int:
    """`env sync|check|remove|list|lock`; exit 3 when an env cannot be built or imported."""
    if not argv or argv[0] not in ("sync", "check", "remove", "list", "lock"):
        print(USAGE, file=sys.stderr)
        return 4
    command, failed = argv[0], 0
    if command == "lock":
        from harness.env.lock import write

        return write(argv[1:])
    envs, given = _arguments(argv[1:])
    if command == "sync" and "env" not in given:
        raise UsageError(
            "env sync wants names: env=triton36,tk38 or env=all (about 2 GB of wheels)"
        )
    for env in envs:
        try:
            if command == "sync":
                print(f"{env.name}: ready in {sync(env):.1f} s")
            elif command == "remove":
                print(f"{env.name}: removed {', '.join(remove(env)) or 'nothing'}")
            elif command == "list":
                state = "built" if not env.missing() else "not built"
                pins = " ".join(package.pin for package in env.packages)
                print(f"{env.name:<14}{state:<11}{env.note}; {pins or 'no overlay'}")
            else:
                print(f"{env.name:<14}{describe(env)}")
        except EnvError as error:
            failed += 1
            print(f"{env.name:<14}NOT_INSTALLED: {error}")
    return 3 if failed else 0


def describe(env: Env) -> str:
    """What a process of the env really imports, on one line."""
    from harness.env.worker import Worker

    if missing := env.missing():
        raise EnvError(
            f"not built: {', '.join(p.pin for p in missing)}; run: env sync env={env.name}"
        )
    with Worker(env) as worker:
        held = worker.call("hello", vendors=True)
    parts = [f"{key} {value}" for key, value in held["versions"].items()]
    return ", ".join(parts)


def with_python(env: Env, python: str | None) -> Env:
    """The same packages over another interpreter."""
    return replace(env, python=python) if python else env
