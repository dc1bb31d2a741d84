"""The browser itself: without it the other tests here would see nothing."""

from __future__ import annotations

import pytest
from playwright.sync_api import Error, Page


def test_the_browser_shows_a_page_and_reaches_no_host_but_this_one(page: Page) -> None:
    page.set_content("<h1>Here</h1>")
    assert page.get_by_role("heading").inner_text() == "Here"
    with pytest.raises(Error, match="ERR_NAME_NOT_RESOLVED"):
        page.goto("http://example.org/")
