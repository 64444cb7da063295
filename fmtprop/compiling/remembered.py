"""A compilation with the choices that an earlier process made for the same graph, options and machine.

They take the place of the enumeration of all ways and of a race. Owns the rule of which choices are kept.
"""

from __future__ import annotations

import logging

from fmtprop.compiling.choices import choices_of, choices_text, key_of_graph
from fmtprop.compiling.compiled import CompiledModel
from fmtprop.compiling.from_graph import compile_graph
from fmtprop.compiling.options import OPTIMAL, Options
from fmtprop.compiling.planned import Planned
from fmtprop.compiling.shapes import Shapes
from fmtprop.errors import FmtpropError
from fmtprop.ir.graph import Graph
from fmtprop.store import keep_text, key_of, text_of

_LOG = logging.getLogger(__name__)


def compile_remembered(graph: Graph, options: Options, shapes: Shapes) -> CompiledModel:
    """Plan the first shape of a model with remembered choices, or remember those that are made."""
    key = _key(graph, options)
    known = None if key is None else _recalled(key)
    if known is not None:
        shapes.note_choices(*known, is_checked=True)  # the key has the options and the machine: there, the plan passed
    net = compile_graph(graph, options, shapes=shapes)
    if key is not None and _is_final(net.compilation):
        keep_text(key, choices_text(net.compilation))
    return net


def _key(graph: Graph, options: Options) -> str | None:
    """Return the key of a graph's choices; None where they are not remembered."""
    if options.policy != OPTIMAL or options.pin or options.is_lazy or options.tuning.is_patient:
        return None
    try:
        return key_of({"choices": key_of_graph(graph, options)})
    except FmtpropError as error:
        _LOG.info("the choices for a graph are not remembered: %s", error)
        return None


def _recalled(key: str) -> tuple[Graph, str] | None:
    text = text_of(key)
    try:
        return None if text is None else choices_of(text)
    except FmtpropError as error:
        _LOG.warning("remembered choices are damaged and made anew: %s", error)
        return None


def _is_final(planned: Planned) -> bool:
    """Return whether choices are new, and as good as another process would make them."""
    return not (planned.is_like_another_shape or planned.left_out or planned.wrong or planned.dropped)
