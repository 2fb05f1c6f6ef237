"""Every yaml composes and fits the schema; names, aliases and mistakes are answered."""

from __future__ import annotations

import pytest

from harness import UsageError
from harness.__main__ import main
from harness.plan import config

OPTIONS = [(group, option) for group, options in config.groups().items() for option in options]


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=lambda x: x)
def test_every_option_composes(group: str, option: str) -> None:
    if group not in ("hw", "model", "path", "impl", "env", "size", "source", "timing"):
        pytest.skip(f"group {group} belongs to another command and is composed by its tests")
    extra = ["source.path=x.safetensors"] if option == "safetensors" else []
    composed = config.compose([f"{group}={option}", *extra])
    assert composed[group].name == option


@pytest.mark.parametrize(
    ("alias", "option"), [("mi355x", "gfx950"), ("MI355X", "gfx950"), ("hopper", "h200")]
)
def test_aliases(alias: str, option: str) -> None:
    assert config.compose([f"hw={alias}"]).hw.name == option


def test_no_alias_is_ambiguous_or_an_option() -> None:
    for group, named in config.aliases().items():
        assert not set(named) & set(config.groups()[group])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["hw=b2000"], "did you mean b200"),
        (["hv=b200"], "did you mean hw"),
        (["model=gptoss_120b"], "gpt_oss_120b"),
        (["path=swizle_blockscale"], "swizzle_blockscale"),
        (["impl=fusd"], "fused"),
        (["tp_size=two"], "tp_size='two' should be of type int"),
        (["generation='3.7'"], "known: 3.5, 3.8"),
        (["hw.speed=3"], "speed"),
        (["+hw.speed=3"], "no config key hw.speed"),
        (["source=safetensors"], "source.path=VALUE"),
        (["hw"], "KEY=VALUE"),
        (["hw=[b200"], "Hydra's grammar"),
    ],
)
def test_mistakes_are_one_sentence(overrides: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says.replace("[", r"\[")) as caught:
        config.compose(overrides)
    assert "\n" not in str(caught.value)


def test_usage_and_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "sweep hw=b200" in capsys.readouterr().out
    assert main([]) == 4
    assert main(["swep"]) == 4
    assert "did you mean sweep" in capsys.readouterr().err
