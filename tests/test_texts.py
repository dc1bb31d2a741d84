"""Texts that would drive a terminal are spelled out."""

from __future__ import annotations

import pytest

from dpexp.texts import first_line, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\r\nc\n", "a\tb\nc\n"),
        ("\x1b[31mred\x07", "\\u001b[31mred\\u0007"),
        ("100 %\rdone\x08", "100 %\\u000ddone\\u0008"),
        ("\x9b31m \u202egnp", "\\u009b31m \\u202egnp"),
        ("half \ud83d", "half \\ud83d"),
        ("Größe 日 👩\u200d🔬", "Größe 日 👩\u200d🔬"),
    ],
)
def test_what_is_not_seen_is_spelled_out(text: str, shown: str) -> None:
    assert visible(text) == shown


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("one\ntwo", "one"),
        ("\n  one \r\ntwo", "one"),
        ("", ""),
        (ValueError("bad\nadvice"), "bad"),
        (ValueError(), "ValueError"),
        (KeyError("\n"), "'\\n'"),
    ],
)
def test_the_first_line_is_the_first_that_says_something(
    told: BaseException | str, expected: str
) -> None:
    assert first_line(told) == expected
