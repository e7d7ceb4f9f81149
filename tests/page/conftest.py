"""One browser for all tests of the page: it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.page.browser import BROWSER, DRIVER, Browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if BROWSER is None or DRIVER is None:
        pytest.skip("no browser is installed (Debian: apt install chromium chromium-driver)")
    browser = Browser()
    yield browser
    browser.close()
