"""Comparison of policies: one model, planned in several ways, each measured after it is compiled."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from fmtprop.report.files import write_text
from fmtprop.report.model import SCHEMA, Report
from fmtprop.system.printable import printable

if TYPE_CHECKING:
    from fmtprop.ir.graph import Graph

#: largest permitted error relative to PyTorch, by the data type of compute-intensive ops
TOLERANCES = {"f32": 1e-4, "bf16": 5e-2, "f16": 1e-2}


@dataclass(frozen=True)
class Measure:
    """The meaning of a comparison's errors."""

    #: `what`, `unit`: the words before and after an error in a sentence
    what: str
    unit: str
    #: largest permitted error, by the data type of compute-intensive ops
    tolerances: Mapping[str, float]
    #: an explanation of the column of errors, if its title is not enough
    note: str = ""

    def failure(self, error: float, precision: str) -> str:
        """Return a sentence about an error, empty if it is within the tolerance."""
        limit = self.tolerances[precision]
        if error <= limit:
            return ""
        return f"{self.what} {error:.1e} {self.unit} (tolerance {limit:.0e} in {precision})"


OUTPUTS = Measure("outputs are off by", "relative to PyTorch", TOLERANCES)

#: of quantized models: a number in the middle between two may be either, and later layers multiply the difference
_ROUNDED = Measure(OUTPUTS.what, OUTPUTS.unit, {precision: max(5e-2, most) for precision, most in TOLERANCES.items()})


def outputs_of(graph: Graph) -> Measure:
    """Return the meaning of errors of a graph's outputs."""
    from fmtprop.ops.quantization import FakeQuantize, Quantize

    rounds = any(isinstance(node.attrs, Quantize | FakeQuantize) for node in graph.nodes())
    return _ROUNDED if rounds else OUTPUTS


@dataclass(frozen=True)
class Comparison:
    """Reports of one model under several policies."""

    #: one for each policy; the first is the baseline of the ratios
    reports: tuple[Report, ...]
    errors: tuple[float, ...]
    measure: Measure = OUTPUTS

    @classmethod
    def of(cls, reports: Sequence[Report], errors: Sequence[float], measure: Measure = OUTPUTS) -> Comparison:
        """Put reports side by side."""
        return cls(tuple(reports), tuple(errors), measure)

    @property
    def failures(self) -> tuple[str, ...]:
        """A sentence for each policy that differs from PyTorch; empty if there is none."""
        told = (
            (report.policy, self.measure.failure(error, report.precision))
            for report, error in zip(self.reports, self.errors, strict=True)
        )
        return tuple(f"policy {policy}: {failure}" for policy, failure in told if failure)

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """Return the comparison as JSON; also write it when a path is given.

        Result: ``policies`` has each report's fields and its ``error``. The error is null if it is no finite number, as
        JSON has only finite ones; such a policy has failed. Raises FmtpropError if the file cannot be written.
        """
        text = json.dumps({"schema": SCHEMA, "policies": self._rows()}, indent=1, allow_nan=False)
        if path is not None:
            write_text(text, path)
        return text

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """Return the comparison as one HTML file that needs no network; also write it when a path is given.

        Raises FmtpropError if the file cannot be written.
        """
        from fmtprop.report.html import page

        text = page(self._rows(), self.failures, self.measure.note or f"errors are {self.measure.unit}")
        if path is not None:
            write_text(text, path)
        return text

    def _repr_html_(self) -> str:
        """Return each policy's verdict and costliest reorders for a notebook."""
        from html import escape

        failures = "".join(f"<p><strong>{escape(printable(failure))}</strong></p>" for failure in self.failures)
        return failures + "".join(report._repr_html_() for report in self.reports)

    def _rows(self) -> list[dict[str, Any]]:
        errors = [error if math.isfinite(error) else None for error in self.errors]
        return [{**report.to_dict(), "error": error} for report, error in zip(self.reports, errors, strict=True)]

    def to_text(self) -> str:
        """Return the comparison as text: a table of the policies, then the whole report of each."""
        from fmtprop.report.text import comparison_text

        return comparison_text(self)

    def summary(self) -> str:
        """Return the comparison as short text: primitives, formats and costliest reorders of each policy."""
        from fmtprop.report.text import comparison_summary

        return comparison_summary(self)
