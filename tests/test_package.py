"""Promises of the repository as a whole: imports, twins, file sizes, and cases covered."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kernels

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "kernels").rglob("*.py"), *(ROOT / "harness").rglob("*.py")])
# Numbers of the public faults this project was started from. 14 is a driver fault, not a layout.
CASES = (
    1, 2, 3, 5, 6, 8, 9, 10, 11, 13, 15, 16, 17, 18, 19, 20, 22, 24, 25, 26, 28, 30, 31, 32, 33, 34,
    36, 37, 39, 40, 42, 44, 45, 47, 48, 49, 51,
)  # fmt: skip


def test_import_of_kernels_is_light_and_touches_no_gpu() -> None:
    code = (
        "import sys, kernels, torch\n"
        "heavy = {'hydra', 'pandas', 'matplotlib', 'harness', 'rich', 'scipy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert kernels.PROJECT == 'fp4-moe-layouts'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_this_is_the_kernels_of_this_project() -> None:
    """A package of Hugging Face has the same import name."""
    assert Path(kernels.__file__) == ROOT / "kernels" / "__init__.py"


def test_kernels_never_imports_harness() -> None:
    for path in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.split(".")[0] == "harness"], path


@pytest.mark.parametrize("routine", list(kernels.ROUTINES))
def test_twins_have_one_signature(routine: str) -> None:
    reference, fused = (kernels.resolve(routine, impl) for impl in kernels.IMPLS)
    shapes = [
        [(p.name, p.kind, p.default) for p in inspect.signature(twin).parameters.values()]
        for twin in (reference, fused)
    ]
    assert shapes[0] == shapes[1]
    assert reference.__doc__, "a public routine says what it does"


def test_public_names() -> None:
    assert callable(kernels.swizzle_blockscale)
    with pytest.raises(AttributeError, match="no attribute 'swizzle_everything'"):
        _ = kernels.swizzle_everything
    with pytest.raises(kernels.LayoutError, match="no routine 'x'; known: reorder"):
        kernels.resolve("x", "reference")
    with pytest.raises(kernels.LayoutError, match="no impl 'cuda'"):
        kernels.resolve("swizzle_blockscale", "cuda")


def test_files_stay_readable() -> None:
    long = {
        str(p.relative_to(ROOT)): n for p in SOURCES if (n := len(p.read_text().split("\n"))) > 351
    }
    assert not long, "split these"
    assert not [p for p in SOURCES if p.name == "utils.py"]


def test_no_path_of_a_machine() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    # Written apart, or this file would find itself.
    homes = re.compile("|".join(("/ro" + "ot/", "/wo" + "rk/", "/home/[a-z]+/", "/tmp/b" + "ash")))
    for name in filter(None, tracked):
        path = ROOT / name
        if path.suffix in (".npz", ".png", ".lock", ".safetensors") or not path.is_file():
            continue
        found = homes.search(path.read_text(encoding="utf-8", errors="replace"))
        assert not found, f"{name}: {found and found.group()}"


def test_every_case_has_a_test() -> None:
    text = "\n".join(p.read_text() for p in (ROOT / "tests").rglob("test_*.py"))
    named = {int(number) for number in re.findall(r"def test_case_?0*(\d+)", text)}
    named |= {
        int(number) for number in re.findall(r"def test_cases?_0*\d+_(?:and_)?0*(\d+)_", text)
    }
    missing = sorted(set(CASES) - named)
    assert not missing
