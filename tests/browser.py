"""A real browser without a window, for what only a browser can tell of a page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BINARY = next(
    (
        found
        for name in ("chromium", "google-chrome", "chromium-browser")
        if (found := shutil.which(name))
    ),
    None,
)
DRIVER = shutil.which("chromedriver")
_QUIET = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)


@contextmanager
def chromium(profile: Path) -> Iterator:
    """A driver of a fresh browser; the test is skipped where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    if BINARY is None or DRIVER is None:
        pytest.skip("needs chromium or google-chrome, and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = BINARY
    for flag in (*_QUIET, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        driver.set_page_load_timeout(50)
        driver.set_script_timeout(20)
        yield driver
    finally:
        driver.quit()


def size(driver, width: int, height: int = 900, *, scale: float = 1, touch: bool = False) -> None:
    """The page's own size, without a window's borders; windows cannot be as narrow as phones."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": touch}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def prefer(driver, **features: str) -> None:
    """What the person at the machine prefers: color_scheme="dark", reduced_motion="reduce"."""
    wanted = [
        {"name": f"prefers-{name.replace('_', '-')}", "value": value}
        for name, value in features.items()
    ]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})
