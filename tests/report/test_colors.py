"""The colours: legible in both themes, distinct in both and in grey print."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from dpexp.report.colors import (
    BACKGROUND,
    PARTS,
    RAISED,
    STRATEGIES,
    TEXT,
    contrast,
    luminance,
    strategy_color,
    variables,
)


def lightness(color: str) -> float:
    """L* of CIELAB, 0 to 100: equal steps look equal."""
    return 116 * luminance(color) ** (1 / 3) - 16


def test_the_contrast_of_black_and_white_and_of_a_grey_is_as_in_the_guidelines() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#ffffff", "#767676") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_have_enough_contrast_on_each_surface(theme: str) -> None:
    low = {
        (name, surface): ratio
        for name, shade in TEXT.items()
        for surface in (BACKGROUND, RAISED)
        if (ratio := contrast(getattr(shade, theme), getattr(surface, theme))) < 4.5
    }
    assert low == {}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_curves_and_bars_stand_out_from_the_page(theme: str) -> None:
    drawn = STRATEGIES | PARTS
    ratios = {
        name: contrast(getattr(shade, theme), getattr(BACKGROUND, theme))
        for name, shade in drawn.items()
    }
    assert {name: ratio for name, ratio in ratios.items() if ratio < 3} == {}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_strategies_and_neighbours_in_a_stack_differ_in_lightness(theme: str) -> None:
    strategies = [getattr(shade, theme) for shade in STRATEGIES.values()]
    parts = [getattr(shade, theme) for shade in PARTS.values()]
    pairs = [*combinations(strategies, 2), *pairwise(parts)]
    assert min(abs(lightness(one) - lightness(other)) for one, other in pairs) > 5


def test_a_light_colour_has_one_name() -> None:
    lights = [shade.light for shade in variables().values()]
    assert len(set(lights)) == len(lights)


def test_an_unknown_strategy_has_the_colour_of_text() -> None:
    assert strategy_color("mine") == TEXT["ink"].light
