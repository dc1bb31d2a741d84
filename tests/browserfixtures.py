"""A headless Chromium for the tests of what a person sees, and the pictures of the README.

The browser and Playwright's driver live for one module: while they do, an event loop runs in the
main thread, which would be in the way of other tests.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_MS = 30_000
# For each thing that a test waits for; a busy machine needs seconds to draw TensorBoard's page.
WAIT_MS = 20_000
MAX_PICTURE_BYTES = 200_000
SIZE = {"width": 1280, "height": 800}

OpenPage = Callable[..., "Page"]
Picture = Callable[[str, "Page | Locator"], None]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Chromium with a home folder of its own, which finds no host but this one."""
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is on the PATH")
    home = str(tmp_path_factory.mktemp("home"))
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(
            executable_path=program,
            # Its sandbox does not work for root in a container. It only opens pages of ours.
            args=[
                "--no-sandbox",
                "--disable-dev-shm-usage",
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            ],
            env={"PATH": os.environ["PATH"], "HOME": home, "LANG": "C.UTF-8"},
            timeout=START_MS,
        )
        yield made
        made.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens an empty page in a context of its own: ``open_page(color_scheme="dark")``."""
    contexts = []

    def opened(**options: Any) -> Page:
        context = browser.new_context(**{"viewport": SIZE, **options})
        contexts.append(context)
        context.set_default_timeout(WAIT_MS)
        return context.new_page()

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture
def page(open_page: OpenPage) -> Page:
    """An empty page."""
    return open_page()


@pytest.fixture
def picture(request: pytest.FixtureRequest) -> Picture:
    """Saves what a page or an element shows as ``<name>.png`` below ``--pictures``, if given."""
    folder: str | None = request.config.getoption("--pictures")

    def save(name: str, shown: Page | Locator) -> None:
        if folder is None:
            return
        from PIL import Image

        image = Image.open(io.BytesIO(shown.screenshot()))
        path = Path(folder) / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        # A page has few colours: a palette makes the file a third as large.
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
        assert path.stat().st_size <= MAX_PICTURE_BYTES, f"{path} is too large for a page"

    return save
