"""Texts and drawings for one HTML file."""

from __future__ import annotations

from dpexp.report.colors import INK
from dpexp.report.markup import inline_svg, shortened, without_addresses

DRAWN = f"""<?xml version="1.0"?>
<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"
 width="10pt" viewBox="0 0 10 10">
 <metadata><x>http://example.org</x></metadata><defs><style>*{{}}</style></defs>
 <g id="unused"><path id="mark" d="M 0.123456 1\n" style="fill: {INK.light}"/></g>
 <use xlink:href="#mark" x="1.23456" clip-path="url(#mark)"/>
 <text style="font-size: 9px; font-family: 'A', b; fill: {INK.light}">{INK.light} &lt;</text>
</svg>"""


def test_a_long_name_keeps_both_ends_on_one_line() -> None:
    assert shortened("abc\ndef", 7) == "abc def"
    assert shortened("0123456789", 7) == "012…789"


def test_no_text_looks_like_an_address_in_the_source() -> None:
    assert without_addresses("see HTTPS://x") == "see &#72;TTPS://x"
    assert without_addresses('<meta http-equiv="x">') == '<meta http-equiv="x">'


def test_a_drawing_becomes_an_element_in_the_colours_of_the_page() -> None:
    assert inline_svg(DRAWN.encode(), "one") == (
        '<svg viewBox="0 0 10 10" aria-hidden="true"><defs /><g>'
        '<path id="one-mark" d="M 0.12 1 " style="fill: var(--ink)" /></g>'
        '<use href="#one-mark" x="1.23" clip-path="url(#one-mark)" />'
        f'<text style="font-size: 9px; fill: var(--ink)">{INK.light} &lt;</text></svg>'
    )
