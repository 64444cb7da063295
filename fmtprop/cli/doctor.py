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
    from fmtprop.jit import unavailable

    diagnosis = diagnose()
    missing = unavailable() if diagnosis.ok else "they need oneDNN"
    if as_json:
        emit(json.dumps({**diagnosis.to_dict(), "kernels": not missing}, indent=1))
    else:
        emit(f"{diagnosis.to_text()}\n{'own kernels':<16} {f'no: {missing}' if missing else 'yes'}")
    if not diagnosis.ok:
        raise typer.Exit(FAILED)
