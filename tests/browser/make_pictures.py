"""The pictures of docs/dashboard.md: ``python tests/browser/make_pictures.py RUN [FOLDER]``, after ``make browser``.

A run that goes on, with some steps behind it, looks best. They are written into ``docs/``, or the folder that is named.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from serving import Serving, browser_path

MAX_BYTES = 150_000
SETTLED_MS = 1500
sync_playwright: Any = import_module("playwright.sync_api").sync_playwright  # in no other target's environment
PICTURES = (
    ("dashboard_flow.png", "flow", "light", (1280, 860)),
    ("dashboard_devices.png", "devices", "dark", (1280, 620)),
    ("dashboard_samples.png", "samples", "light", (1180, 840)),
    ("dashboard_sample.png", "samples", "light", (1180, 1150)),
    ("dashboard_phone.png", "learning", "light", (390, 844)),
)


def main(run: Path, folder: Path) -> None:
    """Take all of them."""
    with Serving([run.absolute()]) as serving, sync_playwright() as started:
        browser: Any = started.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        for name, view, scheme, (width, height) in PICTURES:
            size = {"width": width, "height": height}
            context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
            page = context.new_page()
            page.goto(serving.link())
            page.wait_for_selector("#live.on")
            page.evaluate("hash => { location.hash = hash }", f"#/{view}")
            page.wait_for_selector(f"#tabs a[href='#/{view}'][aria-selected=true]")
            page.wait_for_selector("main[aria-busy=false]")
            if view == "devices":
                page.click("text=last minute")
                page.wait_for_url(re.compile("from="), wait_until="commit")
                page.wait_for_timeout(SETTLED_MS)
            if view == "samples":
                page.wait_for_selector(".grid .rows .row a")
                page.wait_for_timeout(SETTLED_MS)
            if name == "dashboard_sample.png":
                page.click(".grid .rows .row >> nth=3")
                page.wait_for_selector(".lanes svg")
                page.wait_for_timeout(SETTLED_MS)
            page.screenshot(path=folder / name)
            size_bytes = (folder / name).stat().st_size
            assert size_bytes < MAX_BYTES, f"{name} has {size_bytes:,} bytes"
            print(f"wrote {folder / name}: {size_bytes:,} bytes")
            context.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parents[2] / "docs")
