"""What Hydra copies and writes of a job's config is the same, only sooner."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import hydra.core.utils
import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from dpexp.job_config import QuickNode, make_quick, quick_files, to_yaml

PIECES = [
    *(chr(code) for code in range(32, 127) if chr(code) != "$"),  # no interpolations
    *"\n\t\r\0é日😀\u2028\x85\xa0\ufeff", "  ", "\n\n", "word ", "null", "1e3", "0x1", "---",
]  # fmt: skip


def node() -> DictConfig:
    content = {
        "seed": 3,
        "hydra": {"job": {"num": "???", "name": "${seed}"}, "list": [1, {"a": 2}]},
    }
    config = OmegaConf.create(content)
    OmegaConf.set_struct(config, True)
    OmegaConf.set_readonly(config.hydra, True)
    return config


def test_files_have_the_same_bytes(tmp_path: Path) -> None:
    drawn = random.Random(0)
    texts = ["".join(drawn.choices(PIECES, k=drawn.choice([1, 2, 5, 20, 90]))) for _ in range(600)]
    texts += ["word" * 30, "word " * 30, "a: b", ""]
    for text in texts:
        for content in ({"a": text}, {"a": {"b": [text, {"c": text}]}}, {text: 1}):
            config = OmegaConf.create(content)
            assert to_yaml(config) == OmegaConf.to_yaml(config)
    for config in (node(), OmegaConf.create(["a=1", "b='x y'"])):
        hydra.core.utils._save_config(config, "one.yaml", tmp_path / "new")
        with quick_files():
            hydra.core.utils._save_config(config, "two.yaml", tmp_path / "new")
        one, two = ((tmp_path / "new" / name).read_bytes() for name in ("one.yaml", "two.yaml"))
        assert one == two
    assert hydra.core.utils._save_config.__module__ == "hydra.core.utils"


def test_without_libyaml_hydras_own_writer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml, "__with_libyaml__", False)
    monkeypatch.delattr(yaml, "CDumper", raising=False)
    assert to_yaml(node()) == OmegaConf.to_yaml(node())


def test_a_copy_is_a_deep_one_with_the_same_parent() -> None:
    config = node()
    make_quick(config)
    kept = config.hydra
    whole, part = copy.deepcopy(config), copy.deepcopy(kept)
    assert (type(whole), type(part)) == (QuickNode, QuickNode)
    assert kept._get_parent() is config and part._get_parent() is config
    assert whole.hydra._get_parent() is whole and whole._get_parent() is None
    assert OmegaConf.is_readonly(whole.hydra) and OmegaConf.is_readonly(part)
    assert whole == config and part.job.name == 3
    OmegaConf.set_readonly(whole.hydra, False)
    whole.hydra.list[1].a = 5
    assert config.hydra.list[1].a == 2 and OmegaConf.is_readonly(config.hydra)


def test_what_cannot_be_pickled_is_copied_all_the_same() -> None:
    config = node()
    make_quick(config)
    kept: dict[str, Any] = {"f": lambda: 1}
    config._metadata.resolver_cache["mine"] = kept
    copied = copy.deepcopy(config)
    assert copied == config and set(copied._metadata.resolver_cache["mine"]) == {"f"}
