"""Draw the screenshots of docs/report.md: a report in a real browser, at the width of a desk and of a phone.

Needs Chromium: ``python -m docs.pictures.draw_reports`` in the repository's folder.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from fmtprop.api import Options
from fmtprop.bench.policies import compare_policies
from fmtprop.capture import load
from tests.report.browser import CHROMIUM, Page, browsing

FOLDER = Path(__file__).parent
MODEL, POLICIES = "shufflenet_v2", ("plain", "naive", "propagate", "optimal")
#: name -> width and height of the window, whether it is dark, the policy, and the part at the top
PICTURES = {
    "report_desktop": (1440, 2100, False, "naive", ""),
    "report_phone": (390, 1500, True, "naive", "detail"),
}


def main() -> None:
    """Measure a model under all policies, and draw the page."""
    if CHROMIUM is None:
        sys.exit("needs Chromium")
    options = [Options(policy=policy, tune="model") for policy in POLICIES]
    comparison = compare_policies(load(MODEL), options, repeats=40)
    with tempfile.TemporaryDirectory() as name, browsing(Path(name)) as page:
        file = Path(name, "report.html")
        comparison.to_html(file)
        draw(page, file)


def draw(page: Page, file: Path, folder: Path = FOLDER) -> None:
    """Draw all pictures of a page."""
    for picture, (width, height, is_dark, policy, top) in PICTURES.items():
        page.open(file, width=width, height=height, dark=is_dark)
        page.value(
            f"[...document.querySelectorAll('#policies button')].find((b) => b.textContent == '{policy}').click()"
        )
        if top:
            page.value("document.querySelector('#rows td button').click()")
        page.settle()
        page.value(f"(document.getElementById('{top}') ?? document.body).scrollIntoView()")
        page.settle()
        page.screenshot(folder / f"{picture}.png")


if __name__ == "__main__":
    main()
