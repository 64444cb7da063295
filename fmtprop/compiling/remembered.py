"""The choices that an earlier process made for the same graph, options, machine and figures.

They take the place of the enumeration of all ways and of a race; what that process found out besides, such as the
certificate, comes with them. Owns the rule of which choices are kept.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from fmtprop.compiling.choices import choices_of, choices_text, key_of_graph
from fmtprop.compiling.compilation import Compilation
from fmtprop.compiling.entrants import Entrant, entrant_of
from fmtprop.compiling.findings import findings_of, set_findings
from fmtprop.compiling.options import OPTIMAL, Options
from fmtprop.compiling.selection import CORRECTION
from fmtprop.errors import FmtpropError, GraphError
from fmtprop.ir.graph import Graph
from fmtprop.ir.json_text import parse_json
from fmtprop.store import Store, keep_text, key_of, text_of

_LOG = logging.getLogger(__name__)


class Remembered:
    """What earlier processes chose for a graph that is compiled now.

    `plan`: their plan, None where nothing is known.
    """

    def __init__(self, graph: Graph, options: Options) -> None:
        self.plan: Entrant | None = None
        self._findings: Mapping[str, Any] = {}
        self._key, self._figures = _key(graph, options), _figures()
        text = None if self._key is None else text_of(_with_figures(self._key))
        if text is not None:
            self._read(text)

    def settle(self, compilation: Compilation) -> None:
        """Give the earlier findings to a compilation that has the earlier plan, or keep its choices if they are new."""
        if self.plan is not None and compilation.kept.key == self.plan.key:
            self._give_findings(compilation)
        elif self._key is not None and self._is_final(compilation):
            document = {"choices": choices_text(compilation), "findings": findings_of(compilation)}
            keep_text(_with_figures(self._key), json.dumps(document))

    def _is_final(self, compilation: Compilation) -> bool:
        """Return whether choices are new, and as good as another process would make them.

        Where work was left out, another process would leave it out again, unless this one has measured the machine or
        found that costs were wrong.
        """
        if compilation.is_like_another_shape or compilation.wrong or compilation.dropped:
            return False
        left_out = compilation.left_out
        return not left_out or (CORRECTION not in left_out and self._figures == _figures())

    def _read(self, text: str) -> None:
        try:
            document = parse_json(text)
            if not isinstance(document, dict) or not isinstance(document.get("findings"), dict):
                raise GraphError("remembered choices must be an object with findings")
            # the key has the options and the machine: there, the plan passed its check
            self.plan = entrant_of(*choices_of(str(document.get("choices"))), is_checked=True)
            self._findings = document["findings"]
        except FmtpropError as error:
            _LOG.warning("remembered choices are damaged and made anew: %s", error)

    def _give_findings(self, compilation: Compilation) -> None:
        seconds = compilation.seconds  # its own
        try:
            set_findings(compilation, self._findings)
        except FmtpropError as error:
            _LOG.warning("the findings beside remembered choices are damaged: %s", error)
        compilation.seconds = seconds


def _key(graph: Graph, options: Options) -> str | None:
    """Return the key of a graph's choices, but for figures; None where they are not remembered."""
    if options.policy != OPTIMAL or options.pin or options.tuning.is_patient:
        return None
    try:
        return key_of_graph(graph, options)
    except FmtpropError as error:
        _LOG.info("the choices for a graph are not remembered: %s", error)
        return None


def _with_figures(of_graph: str) -> str:
    """Return the key with the figures that are known now, and this code: choices end with what decided them."""
    return key_of({"choices": of_graph, "figures": _figures(), "code": _code()})


def _figures() -> str:
    return Store(warns=False).digest_of_figures()  # the compilation's own store tells the user


@lru_cache(maxsize=1)
def _code() -> int:
    """Return when this package was changed last, in nanoseconds: a checkout changes between two versions."""
    files = Path(__file__).parents[1].glob("*/**/*.py")
    return max((file.stat().st_mtime_ns for file in files), default=0)
