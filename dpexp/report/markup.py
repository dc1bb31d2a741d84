"""Texts and drawings made fit to stand in one HTML file. Pure."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from dpexp.report.colors import variables
from dpexp.texts import visible

_LONG = re.compile(r"-?\d+\.\d{3,}")
_FONT = re.compile(r"font-family:[^;]*;?\s*")
_REFERENCE = re.compile(r"#([\w.-]+)")
_COORDINATES = ("d", "x", "y", "width", "height")


def shortened(text: str, length: int) -> str:
    """At most `length` characters on one line; the middle goes, since names differ at the end."""
    flat = " ".join(visible(text).split())
    if len(flat) <= length:
        return flat
    head = length // 2
    return f"{flat[:head]}…{flat[len(flat) - (length - head - 1) :]}"


def without_addresses(page: str) -> str:
    """The page in which no text looks like an address in the source; a reader sees the same.

    So a search of the file for addresses finds those that it would load or lead to, and there are
    none. Only the name of the attribute ``http-equiv`` stays, which is no text.
    """
    return re.sub(
        "http(?!-equiv)", lambda found: f"&#{ord(found[0][0])};{found[0][1:]}", page, flags=re.I
    )


def inline_svg(drawn: bytes, prefix: str) -> str:
    """Matplotlib's SVG file as an element for HTML.

    Namespaces, metadata and its style sheet (which would hold for the whole page) are left out,
    colours become CSS variables, text has the page's font, and identifiers are those that are
    referred to.

    Args:
        prefix: sets the identifiers of one drawing apart from those of others in the page.
    """
    root = ElementTree.fromstring(drawn)
    for parent in list(root.iter()):
        for child in list(parent):
            if _name(child) in ("metadata", "style"):
                parent.remove(child)
    used = {
        found
        for node in root.iter()
        for value in node.attrib.values()
        for found in _REFERENCE.findall(value)
    }
    for node in root.iter():
        node.tag = _name(node)
        node.attrib = _attributes(node.attrib, prefix, used)
        node.tail = None
        if node.tag != "text":
            node.text = None
    # The element around it has the words for who does not see it.
    root.attrib = {"viewBox": root.attrib["viewBox"], "aria-hidden": "true"}
    return ElementTree.tostring(root, encoding="unicode")


def _name(node: ElementTree.Element) -> str:
    return node.tag.rpartition("}")[2]


def _attributes(found: dict[str, str], prefix: str, used: set[str]) -> dict[str, str]:
    kept: dict[str, str] = {}
    for key, value in found.items():
        name = key.rpartition("}")[2]
        if name == "id":
            if value in used:
                kept["id"] = f"{prefix}-{value}"
        elif name in _COORDINATES:
            kept[name] = _LONG.sub(lambda text: f"{float(text[0]):.2f}", value).replace("\n", "")
        elif name == "href":
            kept["href"] = value.replace("#", f"#{prefix}-")
        elif name == "transform" and value.startswith("rotate(-0 "):
            continue
        elif name == "fill":  # only within style may a value be a variable
            kept["style"] = _style(f"fill: {value}", prefix)
        else:
            kept[name] = (
                _style(value, prefix)
                if name == "style"
                else value.replace("url(#", f"url(#{prefix}-")
            )
    return kept


def _style(style: str, prefix: str) -> str:
    style = _FONT.sub("", style).replace("url(#", f"url(#{prefix}-")
    for name, shade in variables().items():
        style = style.replace(shade.light, f"var(--{name})")
    return style
