"""What a compilation found out besides the plan, as a part of a document: for reports of the plan elsewhere.

With a certificate come the paces that its costs had: by those that runs have taught since, another plan may be cheaper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fmtprop.compiling.planned import Planned
from fmtprop.compiling.race import Race
from fmtprop.errors import PlanError
from fmtprop.ir.file import read_floats, spell_floats
from fmtprop.ir.plain import record_of
from fmtprop.passes.optimal import Certificate
from fmtprop.tuning import Basis, Tuning
from fmtprop.tuning.paces import Paces

_RECORDS = {"certificate": Certificate, "race": Race, "tuning": Tuning}
_TEXTS = ("dropped", "left_out")


def findings_of(one: Planned) -> dict[str, Any]:
    """Return the findings of a compilation as plain data."""
    records = {name: getattr(one, name) for name in _RECORDS}
    found = {name: None if record is None else spell_floats(asdict(record)) for name, record in records.items()}
    paces = [] if one.basis is None else one.basis.paces.records()
    return found | {name: dict(getattr(one, name)) for name in _TEXTS} | {"seconds": dict(one.seconds), "paces": paces}


def set_findings(one: Planned, row: Mapping[str, Any]) -> None:
    """Give findings to a planned model; the row is not trusted.

    Raises PlanError, or another FmtpropError, if it is malformed.
    """
    data = read_floats("its report", dict(row))
    if set(data) != {*_RECORDS, *_TEXTS, "seconds", "paces"}:
        raise PlanError("its report has other keys than a plan's")
    read: dict[str, Any] = {
        name: None if data[name] is None else record_of(kind, data[name]) for name, kind in _RECORDS.items()
    }
    for name, kind in (*((name, str) for name in _TEXTS), ("seconds", float)):
        if not isinstance(data[name], dict) or not all(isinstance(one, kind) for one in data[name].values()):
            raise PlanError(f"its report's {name} must map text to {kind.__name__}")
        read[name] = data[name]
    paces = Paces.of_records(data["paces"])
    if read["certificate"] is not None:
        read["basis"] = Basis(None, paces)
    for name, value in read.items():
        setattr(one, name, value)
