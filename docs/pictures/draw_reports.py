"""Draw the screenshots of docs/report.md: a report in a real browser, at the width of a desk and of a phone.

Needs Chromium: ``python docs/pictures/draw_reports.py``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fmtprop.api import Options
from fmtprop.bench.policies import compare_policies
from fmtprop.frontends import load

FOLDER = Path(__file__).parent
MODEL, POLICIES = "shufflenet_v2", ("plain", "naive", "propagate", "optimal")
#: name -> width of the page, width and height of the window; a window is never as narrow as a phone, but a frame is
PICTURES = {"report_desktop": (1440, 1440, 2100), "report_phone": (390, 500, 1500)}


def main() -> None:
    """Measure a model under all policies, and draw the page."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("needs Chromium")
    options = [Options(policy=policy, tune="model") for policy in POLICIES]
    comparison = compare_policies(load(MODEL), options, repeats=5)
    reorder = comparison.reports[-1].reorders[0].name
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        comparison.to_html(folder / "report.html")
        for picture, (page, width, height) in PICTURES.items():
            place = f"#{reorder}" if page < 600 else ""
            frame = folder / f"{picture}.html"
            frame.write_text(
                f'<!doctype html><body style="margin:0"><iframe src="report.html{place}" '
                f'style="border:0;width:{page}px;height:{height}px"></iframe>'
            )
            command = [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
                f"--user-data-dir={folder / 'user'}", f"--window-size={width},{height}", "--virtual-time-budget=6000",
                f"--screenshot={FOLDER / picture}.png", frame.as_uri(),
            ]  # fmt: skip
            subprocess.run(command, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    main()
