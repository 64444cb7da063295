"""``fmtprop layout``: one memory format, described and drawn."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fmtprop.cli.console import USAGE, emit, failing, note, save


def layout(
    form: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT",
            help="A format tag (nChw16c), strides:5,1, DirectML's dml:NHWC, dml:packed or dml:15,1,5,1, or an XLA "
            "shape (f32[2,3]{0,1}).",
            show_default=False,
        ),
    ],
    dims: Annotated[
        str | None,
        typer.Argument(
            metavar="DIMS", help="Sizes, such as 2,17,5,7; an XLA shape brings its own.", show_default=False
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", "-d", help="Data type of the elements.", show_default="f32")
    ] = None,
    at: Annotated[str | None, typer.Option("--at", metavar="INDEX", help="Where does this index lie?")] = None,
    position: Annotated[int | None, typer.Option("--position", help="Which index lies at this position?")] = None,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw it into a file.")] = None,
) -> None:
    """Describe and draw a memory format.

    Tells strides, blocks, padding and the same in other dialects, and shows a picture. Needs neither PyTorch nor
    oneDNN. Examples: fmtprop layout nChw16c 2,17,5,7 --at 1,16,4,6; fmtprop layout dml:NHWC 1,3,4,5; fmtprop layout
    'f32[2,3]{0,1}'
    """
    from fmtprop.errors import FmtpropError
    from fmtprop.pictures.description import describe, draw, read_layout
    from fmtprop.pictures.svg import OURS

    with failing(USAGE):
        subject = read_layout(form, dims, dtype)
        colour = sys.stdout is not None and sys.stdout.isatty()  # none: the shell's >&-
        text = describe(subject, at=at, position=position, colour=colour)
        if svg is not None:
            if svg.suffix.lower() != ".svg":
                raise FmtpropError(f"{svg}: pictures are drawn as .svg, not {svg.suffix or 'without extension'!r}")
            save(svg, draw(subject), OURS)
    emit(text)
    if svg is not None:
        note(f"wrote {svg}")
