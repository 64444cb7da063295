"""What regions learned in another process: artefacts of PyTorch's own cache, with the choices of each plan.

``torch.compiler.save_cache_artifacts`` asks for them, ``torch.compiler.load_cache_artifacts`` brings them back. Owns
their form. Weights are no part of them: a plan packs the parameters that the model has.
"""

from __future__ import annotations

import json
import logging
import zlib
from dataclasses import dataclass

from fmtprop.compiling.choices import choices_of, choices_text, key_of_graph
from fmtprop.compiling.compiled import CompiledModel
from fmtprop.compiling.options import Options
from fmtprop.dynamo.pytorch import CacheArtifact, CacheArtifactFactory, CacheArtifactManager
from fmtprop.errors import FmtpropError
from fmtprop.ir.graph import Graph

_LOG = logging.getLogger(__name__)

_TYPE = "fmtprop"

#: most bytes of an unpacked artefact
_MOST_NBYTES = 1 << 27

#: key -> content of the artefacts that were loaded, and of those that this process made
_LOADED: dict[str, bytes] = {}
_MADE: dict[str, bytes] = {}


def keep(key: str, content: bytes) -> None:
    """Keep an artefact for the region that will ask."""
    _LOADED[key] = content


try:

    @CacheArtifactFactory.register
    class RegionArtifact(CacheArtifact):
        """What a region learned about one graph."""

        def populate_cache(self) -> None:
            """Keep it for the region that will ask."""
            keep(self.key, self.content)

        @staticmethod
        def type() -> str:
            """Return the name of the type among PyTorch's."""
            return _TYPE

    _RECORD = CacheArtifactManager.record_artifact
except (AttributeError, TypeError):  # PyTorch of before has no artefacts of others
    _RECORD = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Learned:
    """What another process learned about a graph."""

    #: the formatted graph of its plan, and the name of the rewrite before it; None if PyTorch was faster
    choices: tuple[Graph, str] | None
    reason: str


def key_of(graph: Graph, options: Options) -> str | None:
    """Return the key of a graph, None where text cannot hold it."""
    try:
        return key_of_graph(graph, options)
    except FmtpropError as error:
        _LOG.info("a graph has no artefact: %s", error)
        return None


def learned(key: str | None) -> Learned | None:
    """Return what another process learned about a graph."""
    content = _LOADED.get(key) if key is not None else None
    if content is None:
        return None
    try:
        row = json.loads(zlib.decompressobj().decompress(content, _MOST_NBYTES))
        text, reason = row["choices"], f"{row['reason']} (in an earlier process)"
        return Learned(None if text is None else choices_of(text), reason)
    except (FmtpropError, zlib.error, ValueError, KeyError, TypeError) as error:
        _LOG.warning("an artefact of another process is damaged, and the graph is compiled without it: %s", error)
        return None


def record(key: str | None, net: CompiledModel | None, reason: str) -> None:
    """Note what was learned about a graph: its plan, or that PyTorch is faster."""
    if key is None:
        return
    try:
        text = None if net is None else choices_text(net.compilation)
    except FmtpropError as error:
        _LOG.info("a plan has no artefact: %s", error)
        return
    content = _MADE[key] = zlib.compress(json.dumps({"choices": text, "reason": reason}).encode(), 1)
    if _RECORD is not None:
        _RECORD(_TYPE, key, content)


def known() -> dict[str, bytes]:
    """Return all artefacts of this process, by key."""
    return {**_LOADED, **_MADE}
