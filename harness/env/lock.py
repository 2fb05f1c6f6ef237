"""`python -m harness env lock`: writes conf/env/lock.json, the sha256 of every wheel of every env.

pip resolves each pin for each supported CPython on x86-64 Linux without downloading it; a wheel for
any Python is kept once, as `any`. A pin without a wheel for a Python has no entry for it.
"""

from __future__ import annotations

import json
import subprocess
import sys

from harness.env import envs

PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64",
             "manylinux_2_24_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")  # fmt: skip


def resolve(pin: str, python: str) -> tuple[str, str] | None:
    """(wheel file name, sha256) that pip picks for that Python, or None."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed",
               "--no-deps", "--quiet", "--only-binary=:all:", "--target", "none", "--report", "-",
               "--python-version", python, "--implementation", "cp", pin]  # fmt: skip
    for platform in PLATFORMS:
        command += ["--platform", platform]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return None
    (item,) = json.loads(done.stdout)["install"]
    info = item["download_info"]
    return info["url"].rsplit("/", 1)[1], info["archive_info"]["hashes"]["sha256"]


def write(argv: list[str]) -> int:
    """Locks every pin of every env; names in argv are an error, for the lock is one file."""
    if argv:
        print("env lock takes no arguments: it locks every env", file=sys.stderr)
        return 4
    pins = {pin for name in envs.names() for p in envs.load(name).packages for pin in p.pins}
    out: dict[str, dict[str, str]] = {}
    for pin in sorted(pins):
        out[pin] = {}
        for python in PYTHONS:
            if found := resolve(pin, python):
                file, digest = found
                tag = (
                    "any"
                    if "-none-any" in file or "-abi3-" in file
                    else f"cp{python.replace('.', '')}"
                )
                out[pin][tag] = digest
        print(pin, ", ".join(out[pin]) or "no wheel")
    envs.LOCK.write_text(json.dumps(out, indent=1, sort_keys=True) + "\n")
    return 0 if all(out.values()) else 3
