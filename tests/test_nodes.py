"""Copies and plain values of OmegaConf's nodes are those that OmegaConf gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from omegaconf import MISSING, DictConfig, Node, OmegaConf, ValidationError

from dpexp.nodes import copied, plain


class Color(Enum):
    red = 1


@dataclass
class Typed:
    number: int = 3
    either: int | str = "word"
    color: Color = Color.red
    path: Path = Path("a")
    table: dict[str, list[float]] = field(default_factory=lambda: {"x": [1.0]})
    missing: int = MISSING
    none: float | None = None


def test_a_copy_has_all_that_is_known_of_each_node() -> None:
    config = OmegaConf.create(
        {"seed": 3, "hydra": Typed(), "ref": "${seed}", "part": "${hydra}", "no": None},
        flags={"allow_objects": True},
    )
    config.any = [object()]
    config._metadata.resolver_cache["now"][("x",)] = "12"
    OmegaConf.set_readonly(config.hydra, True)
    new: Any = copied(config, None)
    assert known(new) == known(config)
    assert new.any[0] is not config.any[0]
    assert new._metadata.resolver_cache == {"now": {("x",): "12"}}
    new._metadata.resolver_cache["now"].clear()
    new.hydra._metadata.flags["readonly"] = False
    assert config._metadata.resolver_cache["now"] and OmegaConf.is_readonly(config.hydra)
    with pytest.raises(ValidationError):
        new.hydra.number = "no number"
    new.hydra.number = new.seed = 7
    assert (new.ref, new.part.number, config.ref, config.part.number) == (7, 7, 3, 3)


def known(node: Any) -> Any:
    """What OmegaConf knows of a node and of those below."""
    inner = node.__dict__["_content" if "_content" in node.__dict__ else "_val"]
    if isinstance(inner, dict):
        inner = {key: (known(child), child._get_parent() is node) for key, child in inner.items()}
    elif isinstance(inner, list):
        inner = [(known(child), child._get_parent() is node) for child in inner]
    elif isinstance(inner, Node):
        inner = known(inner), inner._get_parent() is node
    elif type(inner) is object:
        inner = object
    others = {k: v for k, v in node.__dict__.items() if k not in ("_content", "_val", "_parent")}
    return type(node), inner, {**others, "_flags_cache": None}


def test_plain_is_what_omegaconf_gives() -> None:
    content = {"a": [1, {"b": "${a}"}], "c": "???", "d": None, "e": Color.red, "f": "${a}"}
    config = OmegaConf.create({**content, Color.red: 2.5, "g": {}, "h": []})
    for names in (False, True):
        assert plain(config, enum_to_str=names) == OmegaConf.to_container(config, enum_to_str=names)
    for part in (OmegaConf.create([1, "x"]), DictConfig(None), DictConfig("???")):
        assert plain(part) == OmegaConf.to_container(part)
