"""Reports as one HTML file with all text, style, code, data and pictures, so it needs no network.

A model's names are untrusted. So the data is JSON that cannot end its element, the page's code inserts it only as
text, and the content security policy permits only the page's own style and scripts, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from html import escape
from importlib import resources
from math import prod
from typing import TYPE_CHECKING, Any

from fmtprop.errors import FmtpropError
from fmtprop.layout import MemoryDesc
from fmtprop.layout.tags import LETTERS
from fmtprop.pictures.svg import draw_svg
from fmtprop.report.ledger import CAUSES
from fmtprop.system.printable import printable

if TYPE_CHECKING:
    from fmtprop.report.model import Report

#: elements along an axis in the picture of a format, unless a block needs more
_DRAWN = 2
#: most elements of a picture
_MOST_DRAWN = 4096
#: rows of the table in a notebook
_ROWS = 10

_PAGE = """<!doctype html>
<!-- fmtprop report -->
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{data}</script>
<script>{library}</script>
<script>{code}</script>
</body>
</html>
"""


def page(policies: Sequence[Mapping[str, Any]], failures: Sequence[str] = (), note: str = "") -> str:
    """Return a page of one model under one or several policies.

    `policies`: reports as plain data, each with its ``error``.
    """
    style, code, library = _asset("report.css"), _asset("report.js"), _asset("echarts.min.js")
    scripts = " ".join(_source(script) for script in (library, code))
    rules = (
        "default-src 'none'",
        f"script-src {scripts}",
        f"style-src {_source(style)}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    )
    data = {"policies": list(policies), "failures": list(failures), "note": note, "pictures": _pictures(policies)}
    title = f"{policies[0]['model']}: reorders" if policies else "reorders"
    return _PAGE.format(
        policy=escape("; ".join(rules)),
        title=escape(printable(title)),
        style=style,
        body=_asset("report.html"),
        data=_json(data),
        library=library,
        code=code,
    )


def notebook(report: Report) -> str:
    """Return the verdict and the costliest reorders as a fragment of HTML, without style or script."""
    rows = sorted(report.reorders, key=lambda row: -row.seconds)[:_ROWS]
    head = ("reorder", "from", "to", "time", "cause", "verdict")
    cells = [
        (row.name, row.src, row.dst, f"{row.seconds * 1e6:.0f} us", row.cause, row.counterfactual.verdict)
        for row in rows
    ]
    caption = f"{report.model}, policy {report.policy}, {report.computes_in}: {report.seconds * 1e3:.3f} ms a run"
    return fragment(caption, report.verdict, head, cells)


def fragment(caption: str, said: Sequence[str], head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a caption, sentences and a table as a fragment of HTML, without style or script."""
    table = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    titles = "".join(f"<th>{_text(title)}</th>" for title in head)
    sentences = "".join(f"<p>{_text(sentence)}</p>" for sentence in said)
    body = f"<table><thead><tr>{titles}</tr></thead><tbody>{table}</tbody></table>" if rows else ""
    return f"<div><p><strong>{_text(caption)}</strong></p>{sentences}{body}</div>"


def _text(value: str) -> str:
    return escape(printable(value))


def _json(data: object) -> str:
    """Return JSON that cannot end its HTML element, nor begin a comment in it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@lru_cache
def _asset(name: str) -> str:
    return (resources.files("fmtprop.report") / "assets" / name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _pictures(policies: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return pictures of all formats as data URLs, and the remedies of all causes."""
    formats = {(row[side], len(row["dims"])) for one in policies for row in one["reorders"] for side in ("src", "dst")}
    # an edge does not tell the rank of its tensor, but the letters of its tag do
    edges = {edge["format"] for one in policies for edge in one["edges"]}
    formats |= {(name, len({*name.partition(":")[2].lower()} & {*LETTERS})) for name in edges}
    found = {name: drawn for name, rank in sorted(formats) if (drawn := _picture(name, rank)) is not None}
    return {"formats": found, "causes": CAUSES}


def _picture(name: str, rank: int) -> str | None:
    """Return the picture of a small tensor in a format; None if the format has no tag."""
    dtype, _, tag = name.partition(":")
    try:
        whole = MemoryDesc((1,) * rank, dtype, tag=tag)
        blocks = [1] * rank
        for block in whole.inner_blocks:
            blocks[block.axis] *= block.size
        dims = tuple(
            1 if rank > 3 and axis == 0 and blocks[0] == 1 else max(_DRAWN, blocks[axis]) for axis in range(rank)
        )
        if prod(dims) > _MOST_DRAWN:
            return None
        svg = draw_svg(MemoryDesc(dims, dtype, tag=tag), title=f"{name}, of {'x'.join(map(str, dims))}")
    except FmtpropError:
        return None
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
