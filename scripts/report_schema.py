"""Write the JSON Schema of reports anew from the dataclasses: ``python -m scripts.report_schema``.

Units are in the names: ``seconds``, ``nbytes`` (bytes), ``bytes_per_second``; shares are from 0 to 1.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from inspect import cleandoc
from pathlib import Path
from typing import Any

from fmtprop.report.model import SCHEMA, Report

TARGET = Path(__file__).resolve().parents[1] / "fmtprop" / "report" / "assets" / "report.schema.json"

_SUMS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["name", "count", "seconds", "nbytes", "padding_nbytes"],
        "properties": {
            "name": {"type": "string"},
            "count": {"type": "integer"},
            "seconds": {"type": "number"},
            "nbytes": {"type": "integer"},
            "padding_nbytes": {"type": "integer"},
        },
    },
}
#: entries of a report's JSON that are no fields
_DERIVED = {
    "totals": {
        "description": "The ledger's sums by class, cause, module and verdict, each the costliest first.",
        "type": "object",
        "properties": dict.fromkeys(("by_kind", "by_part", "by_cause", "by_module", "by_verdict"), _SUMS),
    },
    "modules": {
        "description": "Time of each module and of the reorders in it, and the bytes that these move.",
        "type": "array",
        "items": {
            "type": "object",
            "required": ["name", "seconds", "reorder_seconds", "nbytes"],
            "properties": {
                "name": {"type": "string"},
                "seconds": {"type": "number"},
                "reorder_seconds": {"type": "number"},
                "nbytes": {"type": "integer"},
            },
        },
    },
    "precisions": {
        "description": "Steps and their time by the data type of their first source.",
        "type": "array",
        "items": {
            "type": "object",
            "required": ["name", "steps", "seconds"],
            "properties": {"name": {"type": "string"}, "steps": {"type": "integer"}, "seconds": {"type": "number"}},
        },
    },
    "costs": {"description": "Sources of the costs: modelled, measured, or modelled and measured.", "type": "string"},
    "fallback_share": {"description": "Part of the run in steps without optimized code.", "type": "number"},
    "warnings": {"type": "array", "items": {"type": "string"}},
    "verdict": {"description": "The report in a few sentences.", "type": "array", "items": {"type": "string"}},
}
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def json_schema() -> dict[str, Any]:
    """Return the schema of the results of :meth:`Report.to_json` and :meth:`Comparison.to_json`.

    Result: JSON Schema, draft 2020-12, of two forms: ``schema`` and the fields of a report; or ``schema`` and
    ``policies``, a list of reports, each with its ``error`` against PyTorch.

    >>> json_schema()["$defs"]["ReorderRow"]["properties"]["seconds"]["type"]
    'number'
    """
    definitions: dict[str, Any] = {}
    _define(Report, definitions)
    report = definitions["Report"]
    report["properties"] |= _DERIVED
    report["required"] += list(_DERIVED)
    version = {"schema": {"const": SCHEMA}}
    compared = {
        "allOf": [{"$ref": "#/$defs/Report"}],
        "required": ["error"],
        "properties": {"error": {"description": "Largest relative error.", "type": ["number", "null"]}},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:fmtprop:report:{SCHEMA}",
        "title": "A report of fmtprop",
        "type": "object",
        "required": ["schema"],
        "properties": version,
        "anyOf": [
            {"required": ["policies"], "properties": {"policies": {"type": "array", "items": compared}}},
            {"$ref": "#/$defs/Report"},
        ],
        "$defs": definitions,
    }


def _define(kind: type, definitions: dict[str, Any]) -> dict[str, str]:
    if kind.__name__ not in definitions:
        schema: dict[str, Any] = {"description": (kind.__doc__ or "").split("\n")[0], "type": "object"}
        definitions[kind.__name__] = schema
        told, hints = _told(kind), typing.get_type_hints(kind, _Names(kind))
        schema["properties"] = {
            field.name: {
                **({"description": told[field.name]} if field.name in told else {}),
                **_of(hints[field.name], definitions),
            }
            for field in fields(kind)
        }
        schema["required"] = [field.name for field in fields(kind)]
    return {"$ref": f"#/$defs/{kind.__name__}"}


class _Names(dict[str, Any]):
    """The names of a module, and those that it imports only for annotations."""

    def __init__(self, kind: type) -> None:
        import sys

        from fmtprop.passes.optimal import Certificate
        from fmtprop.tuning import Tuning

        super().__init__(
            vars(sys.modules[kind.__module__]) | {"Certificate": Certificate, "Tuning": Tuning, "Race": dict}
        )


def _told(kind: type) -> dict[str, str]:
    """Return the description of each parameter in a docstring."""
    text = cleandoc(kind.__doc__ or "").partition("Parameters\n----------\n")[2]
    found = {}
    for names, words in re.findall(r"^(\w+(?:, \w+)*) : [^\n]*\n((?:    [^\n]*\n?)+)", text, re.MULTILINE):
        for name in names.split(", "):
            found[name] = re.sub(r"\s+", " ", words).strip().replace("``", "").replace(":data:", "")
    return found


def _of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if is_dataclass(hint) and isinstance(hint, type):
        return dict(_define(hint, definitions))
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_of(one, definitions) for one in arguments]}
    if origin is tuple and arguments[-1] is Ellipsis:
        return {"type": "array", "items": _of(arguments[0], definitions)}
    if origin is tuple:
        return {"type": "array", "prefixItems": [_of(one, definitions) for one in arguments]}
    if origin in (Mapping, dict):
        return {"type": "object", "additionalProperties": _of(arguments[1], definitions)}
    return {"type": "object"}


if __name__ == "__main__":
    TARGET.write_text(json.dumps(json_schema(), indent=1) + "\n", encoding="utf-8")
