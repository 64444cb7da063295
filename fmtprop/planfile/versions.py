"""Documents of older plan files, taken to the present version step by step.

The rule: fmtprop reads all versions up to its own. A change of the document after which a file means something else, or
could not be read, gets a new version, and a step here. An older file never fits: it is planned again from the graph
inside.
"""

from __future__ import annotations

from typing import Any


def renewed(document: Any, version: int) -> Any:
    """Return a document of a version as one of the present version; nothing in it is trusted, or checked yet."""
    if not isinstance(document, dict) or version > 2:
        return document
    for plan in document["plans"] if isinstance(document.get("plans"), list) else ():
        if not isinstance(plan, dict):
            continue
        if version < 2:  # it did not say how formats were chosen
            plan.setdefault("choices", {})
        if isinstance(plan.get("report"), dict):  # nor the paces of its costs
            plan["report"].setdefault("paces", [])
    if isinstance(document.get("environment"), dict):
        document["environment"]["plan file"] = f"version {version}"
    return document
