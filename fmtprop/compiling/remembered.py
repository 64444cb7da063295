"""A compilation with the choices that an earlier process made for the same graph, options, machine and figures.

They take the place of the enumeration of all ways and of a race; what that process found out besides, such as the
certificate, comes with them. Owns the rule of which choices are kept.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from fmtprop.compiling.choices import choices_of, choices_text, key_of_graph
from fmtprop.compiling.compilation import Compilation
from fmtprop.compiling.compiled import CompiledModel
from fmtprop.compiling.entrants import Entrant
from fmtprop.compiling.findings import findings_of, set_findings
from fmtprop.compiling.from_graph import compile_graph
from fmtprop.compiling.options import OPTIMAL, Options
from fmtprop.compiling.planned import Planned
from fmtprop.compiling.shapes import Shapes
from fmtprop.errors import FmtpropError, GraphError
from fmtprop.ir.graph import Graph
from fmtprop.ir.json_text import parse_json
from fmtprop.store import Store, keep_text, key_of, text_of

_LOG = logging.getLogger(__name__)

#: an earlier process's formatted graph, the name of the rewrite before it, and that process's findings
_Known = tuple[Graph, str, Mapping[str, Any]]


def compile_remembered(graph: Graph, options: Options, shapes: Shapes) -> CompiledModel:
    """Plan the first shape of a model with remembered choices, or remember those that are made."""
    of_graph = _key(graph, options)
    known = None if of_graph is None else _recalled(_with_figures(of_graph))
    if known is None:
        net = compile_graph(graph, options, shapes=shapes)
    else:
        formatted, rewrite, findings = known
        # the key has the options and the machine: there, the plan passed its check
        entrant = shapes.note_choices(formatted, rewrite, is_checked=True)
        net = compile_graph(graph, options, shapes=shapes)
        _give_findings(net.compilation, entrant, findings)
    if of_graph is not None and _is_final(net.compilation):
        document = {"choices": choices_text(net.compilation), "findings": findings_of(net.compilation)}
        keep_text(_with_figures(of_graph), json.dumps(document))
    return net


def _key(graph: Graph, options: Options) -> str | None:
    """Return the key of a graph's choices, but for figures; None where they are not remembered."""
    if options.policy != OPTIMAL or options.pin or options.is_lazy or options.tuning.is_patient:
        return None
    try:
        return key_of_graph(graph, options)
    except FmtpropError as error:
        _LOG.info("the choices for a graph are not remembered: %s", error)
        return None


def _with_figures(of_graph: str) -> str:
    """Return the key with the figures that are known now: choices end with those that decided them."""
    return key_of({"choices": of_graph, "figures": Store().digest_of_figures()})


def _recalled(key: str) -> _Known | None:
    text = text_of(key)
    if text is None:
        return None
    try:
        document = parse_json(text)
        if not isinstance(document, dict) or not isinstance(document.get("findings"), dict):
            raise GraphError("remembered choices must be an object with findings")
        return *choices_of(str(document.get("choices"))), document["findings"]
    except FmtpropError as error:
        _LOG.warning("remembered choices are damaged and made anew: %s", error)
        return None


def _give_findings(planned: Planned, entrant: Entrant, findings: Mapping[str, Any]) -> None:
    """Give the earlier process's findings to a plan that is the same in all choices; the seconds are its own."""
    if not isinstance(planned, Compilation) or planned.kept.key != entrant.key:
        return
    seconds = planned.seconds
    try:
        set_findings(planned, findings)
    except FmtpropError as error:
        _LOG.warning("the findings beside remembered choices are damaged: %s", error)
    planned.seconds = seconds


def _is_final(planned: Planned) -> bool:
    """Return whether choices are new, and as good as another process would make them."""
    return not (planned.is_like_another_shape or planned.left_out or planned.wrong or planned.dropped)
