"""Version environments: locked by hash, cached, removable; what each env file says."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from harness import UsageError
from harness.env import envs
from harness.env.envs import Env, EnvError, Package

TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"
IDNA = Package(("idna==3.20",))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FP4_MOE_ENVS", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("name", envs.names())
def test_every_pin_of_every_env_is_exact_and_locked_for_this_python(name: str) -> None:
    env = envs.load(name)
    assert env.name == name
    assert env.note
    for package in env.packages:
        for pin in package.pins:
            assert pin.count("==") == 1
            assert len(envs._hash(pin, TAG)) == 64


def test_the_named_versions_are_the_ones_asked_for() -> None:
    pins = {pin for name in envs.names() for p in envs.load(name).packages for pin in p.pins}
    for wanted in ("3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0"):
        assert f"triton=={wanted}" in pins
    assert {"flashinfer-python==0.6.13", "flashinfer-python==0.7.4", "vllm==0.33.0"} <= pins
    assert envs.load("current").packages == ()


def test_unknown_env_is_answered_with_close_matches() -> None:
    with pytest.raises(UsageError, match="did you mean triton3"):
        envs.load("triton63")


def test_unlocked_pin_is_refused() -> None:
    with pytest.raises(EnvError, match=r"nothing==1\.0 is not locked"):
        Env("x", (Package(("nothing==1.0",)),)).folders()


def test_another_interpreter_must_run(cache: Path) -> None:
    with pytest.raises(EnvError, match="cannot be run"):
        envs.load("triton36", "/no/such/python").folders()


def test_unpack_takes_only_the_folders_named(tmp_path: Path) -> None:
    wheel = tmp_path / "big-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("big/a.py", "big/lib.so", "big/third/inner/b.py", "other/c.py"):
            archive.writestr(name, name)
        archive.writestr("big-1.data/purelib/extra.py", "extra")
        archive.writestr("big-1.data/scripts/tool", "tool")
    envs.unpack(wheel, tmp_path / "some", [("big", "big"), ("big/third/inner", "inner")])
    envs.unpack(wheel, tmp_path / "all")
    some = {str(p.relative_to(tmp_path / "some")) for p in (tmp_path / "some").rglob("*.*")}
    every = {str(p.relative_to(tmp_path / "all")) for p in (tmp_path / "all").rglob("*.*")}
    assert some == {"big/a.py", "inner/b.py"}
    assert every == {"big/a.py", "big/lib.so", "big/third/inner/b.py", "other/c.py", "extra.py"}


def test_sync_downloads_once_and_remove_keeps_what_another_env_uses(cache: Path) -> None:
    one, two = Env("one", (IDNA,)), Env("two", (IDNA,))
    said: list[str] = []
    envs.sync(one, said.append)
    (folder,) = one.folders()
    assert (folder / "idna" / "__init__.py").is_file()
    envs.sync(two, said.append)
    assert said == ["one: idna==3.20"]
    assert envs.remove(one) == []
    assert folder.is_dir()
    assert envs.remove(two) == [folder.name]
    assert not folder.exists()


def test_a_wheel_with_another_hash_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envs, "_hash", lambda pin, tag: "0" * 64)
    with pytest.raises(EnvError, match=r"env one: idna==3\.20"):
        envs.sync(Env("one", (IDNA,)), lambda said: None)
    assert not any(p.name.startswith("idna") for p in cache.iterdir())


def test_command_says_what_is_not_built(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert envs.main(["check", "env=triton36"]) == 3
    assert "NOT_INSTALLED: not built: triton==3.6.0" in capsys.readouterr().out
    assert envs.main(["list"]) == 0
    assert "not built" in capsys.readouterr().out
    assert envs.main(["build"]) == 4
