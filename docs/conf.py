"""How `make docs` builds the site: guides, and a reference from the docstrings. The checkout is its source."""

from __future__ import annotations

from importlib import metadata
from typing import Any

project = "fmtprop"
author = "The fmtprop authors"
release = metadata.version("fmtprop")

#: every page, in the order in which the site shows them
NAVIGATION = {
    "Start": [
        *(
            "README",
            "docs/tutorial",
            "docs/pytorch",
            "docs/language_models",
            "docs/quantization",
            "docs/training",
            "docs/deploy",
            "docs/onnx",
            "docs/report",
        ),
        "docs/verbose",
    ],
    "Understand": ["docs/architecture", "docs/layout", "docs/numerics", "docs/mkldnn", "docs/dnnl", "docs/verifier"],
    "Measured": [
        "docs/performance",
        "docs/coverage",
        "docs/doors",
        "docs/onnx_models",
        "docs/experiments",
        "benchmarks/README",
    ],
    "Look up": ["docs/api", "docs/onnx_operators", "docs/glossary", "graphs/README"],
    "Project": ["CONTRIBUTING", "CHANGELOG"],
}

root_doc = "docs/index"
include_patterns = [f"{page}.*" for pages in NAVIGATION.values() for page in pages] + ["docs/index.md"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
napoleon_google_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings have them
html_theme = "furo"
html_title = f"fmtprop {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
#: entries of the navigation that have another title than their page
_TITLES = {"README": "Overview"}


def setup(app: Any) -> None:
    """Let the front page end in the navigation, which a reader of the file alone has no use for."""
    app.connect("source-read", _with_navigation)


def _with_navigation(app: object, page: str, source: list[str]) -> None:
    if page == root_doc:
        for caption, pages in NAVIGATION.items():
            titled = ((_TITLES.get(entry), f"/{entry}") for entry in pages)
            entries = "\n".join(path if title is None else f"{title} <{path}>" for title, path in titled)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"
