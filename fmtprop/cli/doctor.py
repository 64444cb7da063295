"""``fmtprop doctor``: the libraries in use and the missing ones."""

from __future__ import annotations

import json

import typer

from fmtprop.cli.arguments import Json
from fmtprop.cli.console import FAILED, emit


def doctor(as_json: Json = False) -> None:
    """Show the libraries in use and the missing ones.

    Shows the oneDNN library, the instruction set, and packages to install. Exits with 1 if oneDNN cannot be used.
    """
    from fmtprop.dnnl.doctor import diagnose
    from fmtprop.jit import no_tiles, unavailable

    diagnosis = diagnose()
    missing = unavailable() if diagnosis.ok else "they need oneDNN"
    without_tiles = missing or no_tiles()
    if as_json:
        emit(json.dumps({**diagnosis.to_dict(), "kernels": not missing, "tiles": not without_tiles}, indent=1))
    else:
        emit(diagnosis.to_text())
        for name, reason in (("own kernels", missing), ("AMX tiles", without_tiles)):
            emit(f"{name:<16} {f'no: {reason}' if reason else 'yes'}")
    if not diagnosis.ok:
        raise typer.Exit(FAILED)
