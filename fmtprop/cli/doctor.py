"""``fmtprop doctor``: what runs here and what is missing."""

from __future__ import annotations

import json

import typer

from fmtprop.cli.arguments import Json
from fmtprop.cli.console import FAILED, emit


def doctor(as_json: Json = False) -> None:
    """Tell what runs here and what is missing.

    Which oneDNN library was found, what this CPU can do, what to install. Exits with 1 if oneDNN cannot be used.
    """
    from fmtprop.dnnl.doctor import diagnose

    diagnosis = diagnose()
    emit(json.dumps(diagnosis.to_dict(), indent=1) if as_json else diagnosis.to_text())
    if not diagnosis.ok:
        raise typer.Exit(FAILED)
