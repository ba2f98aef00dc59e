"""A headless Chromium for the tests of pages, and what it saw."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests import needs
from tests.ports import free_port

INSTALL = "no Chromium with its driver: apt-get install chromium chromium-driver"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1100,900")


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser. Without one, the test is skipped, and fails under CI."""
    binary, driver = next(filter(None, map(shutil.which, BROWSERS)), None), shutil.which("chromedriver")
    if binary is None or driver is None:
        needs.lack(INSTALL)
    webdriver = needs.package("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    running = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver, port=free_port()))
    try:
        yield running
    finally:
        running.quit()


def complaints(browser: Any) -> list[str]:
    """Severe messages of the console since the last call: failed scripts, and loads that a page's policy blocked."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
