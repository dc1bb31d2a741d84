"""What ``--help`` prints. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from dpexp.builtin import GROUPS
from dpexp.schema import NESTED, Config


def help_text(experiments: Sequence[str]) -> str:
    """The text of ``--help``: every key with its documentation, grouped.

    Args:
        experiments: the presets.
    """
    lines = [
        "dpexp: how does this model, on this data, scale over devices?",
        "",
        "  python -m dpexp [key=value ...]         one run",
        "  python -m dpexp -m key=a,b,c ...        a sweep over every combination",
        "",
        "== Config groups ==  (group=option; your class: group=custom group._target_=mod.Class)",
        "",
    ]
    sections: dict[str, list[str]] = {}
    for spec in fields(Config):
        section = spec.metadata["section"]
        if section and section != "groups":
            sections.setdefault(section, []).extend(_key_lines(spec.name, spec.metadata["doc"]))
    for group, options in GROUPS.items():
        lines.append(f"  {group:<12}{', '.join(options)}")
    lines.append(f"  {'+experiment':<12}{', '.join(experiments)}  (presets)")
    lines.append(f"  {'+cluster':<12}slurm  (the tasks of an srun are the ranks)")
    for section, entries in sections.items():
        lines += ["", f"== {section.capitalize()} ==", "", *entries]
    lines += ["", "== Options of the strategy ==", "", *_nested_lines("parallel")]
    lines += ["", "== This config ==  (with the overrides given)", "", "$CONFIG", ""]
    lines += [
        "Print the config only: --cfg job. Hydra's flags: --hydra-help.",
        "Tab completion, and what the words mean: docs/reference.md.",
        "",
    ]
    return "\n".join(lines)


def _key_lines(name: str, doc: str) -> list[str]:
    return _nested_lines(name) if name in NESTED else [f"  {name:<19}{doc}"]


def _nested_lines(name: str) -> list[str]:
    return [
        f"  {name + '.' + spec.name:<34}{spec.metadata['doc']}" for spec in fields(NESTED[name])
    ]
