"""Take the pictures of a report that the README shows: python docs/images/screenshot.py REPORT.

Needs playwright and a chromium on PATH; writes report-light.png and report-dark.png beside itself.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright


def main(report: Path) -> None:
    """Write one picture per theme."""
    executable = shutil.which("chromium")
    if executable is None:
        raise SystemExit("no chromium on PATH")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=executable, args=["--no-sandbox", "--disable-gpu", "--no-first-run"]
        )
        for theme in ("light", "dark"):
            page = browser.new_page(
                viewport={"width": 1280, "height": 1560},
                color_scheme="light" if theme == "light" else "dark",
                device_scale_factor=1.0,
            )
            page.goto(report.resolve().as_uri())
            page.screenshot(path=Path(__file__).with_name(f"report-{theme}.png"))
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
