"""Texts of others made fit to be shown. Pure."""

from __future__ import annotations

import re

# What drives a terminal, is not allowed in HTML and XML, or turns the order of the text around.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufdd0-\ufdef"
    "\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff]"
)


def visible(text: str) -> str:
    """`text` with control characters, marks of direction and half characters spelled out."""
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text.replace("\r\n", "\n"))


def first_line(told: BaseException | str) -> str:
    """The first line of a message; of an error that says nothing, its kind."""
    otherwise = type(told).__name__ if isinstance(told, BaseException) else ""
    return next(iter(str(told).strip().splitlines()), otherwise).strip()
