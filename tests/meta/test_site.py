"""The site that `make docs` builds: every page is in its navigation, every link and anchor leads somewhere.

Nothing is built here: Sphinx is not needed.
"""

from __future__ import annotations

import re
import runpy
from collections import defaultdict
from importlib import import_module
from pathlib import Path

import pytest

import fmtprop

ROOT = Path(__file__).parents[2]
NAVIGATION = runpy.run_path(str(ROOT / "docs" / "conf.py"))["NAVIGATION"]
PAGES = [page for pages in NAVIGATION.values() for page in pages]
LINK = re.compile(r"\[[^\]]*\]\(([^)#:\s]*)(?:#([^)\s]*))?\)")


def source(page: str) -> Path:
    (path,) = ROOT.glob(f"{page}.*")
    return path


def prose(path: Path) -> str:
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    titles = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_document_is_a_page_once() -> None:
    written = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/*.rst")]
    written += [*ROOT.glob("benchmarks/*.md"), *ROOT.glob("graphs/*.md")]
    names = {path.relative_to(ROOT).with_suffix("").as_posix() for path in written}
    assert len(PAGES) == len(set(PAGES))
    assert names - {"docs/index"} == set(PAGES)


@pytest.mark.parametrize("page", ["docs/index", *PAGES])
def test_links_lead_to_pages_and_headings(page: str) -> None:
    path = source(page)
    for target, anchor in LINK.findall(prose(path)):
        other = (path.parent / target).resolve() if target else path
        assert other.exists(), target
        if anchor:
            assert anchor in anchors(other), f"{target}#{anchor}"


def test_links_are_seen() -> None:
    """The test above would pass without any."""
    found = [link for page in PAGES for link in LINK.findall(prose(source(page)))]
    assert len(found) > 25 and sum(anchor != "" for _, anchor in found) > 3


def test_the_reference_has_every_public_name() -> None:
    listed: dict[str, set[str]] = defaultdict(set)
    room = ""
    for kind, name in re.findall(r"^\.\. (\w+):: ([\w.]+)$", source("docs/api").read_text(), re.MULTILINE):
        if kind == "currentmodule":
            room = name
        elif kind == "automodule":
            listed["fmtprop"].add(name.rpartition(".")[2])
        elif kind.startswith("auto"):
            listed[room].add(name)
    errors = {name for name in fmtprop.__all__ if name.endswith("Error")}
    rooms = {"errors", "serving"}
    assert listed.pop("fmtprop") == set(fmtprop.__all__) - errors - {"__version__"} | rooms
    assert listed == {room: set(import_module(room).__all__) for room in ("fmtprop.serving", "fmtprop.ray")}
