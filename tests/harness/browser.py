"""ComfyUI's own front end in a headless Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from tests.harness.host import HostProcess

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
READY_MS = 60_000


def chromium_path() -> str | None:
    """Return the browser to use: ``$CHROME_PATH``, else one on the path; None leaves it to Playwright."""
    chosen = os.environ.get("CHROME_PATH")
    if chosen:
        return chosen
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def launch(playwright: Any) -> Any:
    """Start a browser, or say how to get one."""
    path = chromium_path()
    known = Path(path or playwright.chromium.executable_path)
    if not known.is_file():
        raise FileNotFoundError(
            "No Chromium was found. Install one (Debian: apt-get install chromium), or set CHROME_PATH to a "
            "Chrome or Chromium you have, or run `python -m playwright install chromium` in .venv."
        )
    return playwright.chromium.launch(executable_path=str(known), args=list(FLAGS))


@contextmanager
def front_end(host: HostProcess, *, vue_nodes: bool = False) -> Iterator[Page]:
    """Open the front end and wait until its graph is there.

    Args:
        host: serves it.
        vue_nodes: draw nodes with the newer of the front end's two renderers.
    """
    # The first setting keeps a first visit from opening the templates.
    host.post("/settings", {"Comfy.TutorialCompleted": True, "Comfy.VueNodes.Enabled": vue_nodes})
    with sync_playwright() as playwright:
        browser = launch(playwright)
        try:
            page = browser.new_page(viewport={"width": 1900, "height": 1000})
            page.goto(host.address)
            page.wait_for_function("() => window.app?.vueAppReady && window.app.graph", timeout=READY_MS)
            yield page
        finally:
            browser.close()


def open_dialogs(page: Page) -> list[str]:
    """Return the texts of the dialogs that are open: missing nodes, errors."""
    return [dialog.inner_text() for dialog in page.locator(".p-dialog").all() if dialog.is_visible()]
