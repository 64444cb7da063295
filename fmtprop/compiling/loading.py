"""Loading a plan file: where it fits this machine it is restored, else planned again from the graph inside."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any

import torch

from fmtprop import dnnl
from fmtprop.compiling.compiled import CompiledModel
from fmtprop.compiling.inputs import examples_of
from fmtprop.compiling.options import Options, Tune
from fmtprop.compiling.restored import Restored
from fmtprop.errors import FmtpropError, LoadError, PlanError, UnsupportedOpError
from fmtprop.layout import MemoryDesc
from fmtprop.planfile.container import Container, mapped
from fmtprop.planfile.descs import at, descs_of
from fmtprop.planfile.environment import differences, environment
from fmtprop.planfile.rebuild import NotOfferedError
from fmtprop.planfile.references import References
from fmtprop.planfile.versions import renewed
from fmtprop.runtime.arenas import GROWTH, Arenas
from fmtprop.runtime.threads import on_cpu
from fmtprop.system import collector
from fmtprop.system.files import path_of

if TYPE_CHECKING:
    from fmtprop.compiling.dynamic import DynamicModel

#: what to do with a plan that was made for another machine, library or number of threads
MISMATCHES = ("replan", "error")

#: what holds the bytes of a plan file
_BYTES = bytes | bytearray | memoryview | PickleBuffer

#: keys of a model for several shapes
_OF_SEVERAL = ("program", "max_shapes", "buckets")

_KEYS = {"kind": str, "environment": dict, "options": dict, "plans": list, "descs": list, "checksums": list}


def load_plan(path: Any, on_mismatch: str = "replan", weights: Any = None) -> CompiledModel | DynamicModel:
    """Return the model of a plan file.

    Parameters
    ----------
    path : str, path or bytes
        A file that a model's ``save`` wrote, from any source: nothing in it is
        trusted, and nothing is executed. It is mapped, so processes that load it share the memory of its weights; while
        one of them runs, the file may be replaced or removed, but not be written in place. Bytes of such a file work,
        too.
    on_mismatch : {"replan", "error"}
        What to do if the plan does not fit here. It fits if the versions of fmtprop, PyTorch and oneDNN, the
        instruction set, the number of threads and the CPU's caches are those of the machine that made it. Otherwise
        ``"replan"`` plans it again from the graph in the file, with a warning that says what differs, and ``"error"``
        raises PlanError.
    weights : str, path or sequence of them, optional
        Where the weights files are that the plan was saved with: the files in the same order, or their folder. Without
        it, they are looked for beside the plan file, under the names that they had then, and must not be links: a
        plan file from a stranger never chooses a path. Each must have the same content as then.

    Returns
    -------
    CompiledModel or DynamicModel
        As it was saved. A dynamic model has its plans, and makes others for other shapes. Where the plans fit, they
        have the same implementations in the same formats, and give equal bits. Nothing is measured or compared.

    Raises
    ------
    PlanError
        The file cannot be read, is no plan file of a known version, is damaged, or does not fit with ``"error"``; or
        a weights file is missing, or is another one.

    Examples
    --------
    >>> import pathlib, tempfile, torch, fmtprop as fp
    >>> net, x = fp.compile(torch.nn.Linear(8, 4), torch.ones(2, 8)), torch.ones(2, 8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     net.save(pathlib.Path(folder) / "linear.fmtplan")
    ...     again = fp.load_plan(pathlib.Path(folder) / "linear.fmtplan")
    >>> torch.equal(again(x), net(x))
    True
    """
    if on_mismatch not in MISMATCHES:
        raise UnsupportedOpError(f"on_mismatch must be 'replan' or 'error', got {on_mismatch!r}")
    source = "plan" if isinstance(path, _BYTES) else f"plan file {path}"
    with (
        torch.autocast("cpu", enabled=False),
        torch.inference_mode(mode=False),
        on_cpu(),
        collector.paused(),
        _naming(source),
    ):
        return dnnl.after_fork(lambda: _loaded(path, source, on_mismatch, weights))


def load_one(path: Any) -> CompiledModel:
    """Return the model of a plan file for one shape: of several, the one that was used last before they were saved."""
    net = load_plan(path)
    return net if isinstance(net, CompiledModel) else net.plan_for()


@dataclass(frozen=True)
class PlanFile:
    """A plan file, read but not built."""

    environment: dict[str, str]
    differing: list[str]
    options: Options
    plans: list[Restored]
    #: what a model for several shapes has besides: `program`, `max_shapes`, `buckets`
    several: dict[str, Any] | None
    descs: Sequence[MemoryDesc]
    blocks: Sequence[torch.Tensor]

    def model(self) -> CompiledModel | DynamicModel:
        """Return the model of the plans, which are built."""
        arenas = Arenas(growth=GROWTH if self.several is not None else 1)
        nets = [CompiledModel(plan, arenas) for plan in self.plans]
        return nets[0] if self.several is None else self._dynamic(nets)

    def planned_again(self) -> CompiledModel | DynamicModel:
        """Return the model with plans that are made here, of the graph in the file."""
        from fmtprop.compiling.from_graph import compile_graph  # all of a compilation, which plans that fit do without

        if self.several is None:
            graph, options = self.plans[0].inside(), self.options
            pins = {name: desc for name, desc in options.pin.items() if name.rpartition(".")[0] in graph}
            return compile_graph(graph, replace(options, pin=pins, keep_float=()), owned=True)
        net = self._dynamic([])
        for plan in self.plans:
            net.plan_flat(examples_of(plan.formatted))
        return net

    def _dynamic(self, nets: Sequence[CompiledModel]) -> DynamicModel:
        from fmtprop.compiling.dynamic import DynamicModel
        from fmtprop.compiling.stored_program import StoredProgram

        several, graph = self.several or {}, self.plans[0].formatted
        program = StoredProgram(several["program"], self.descs, self.blocks, graph, self.plans if nets else ())
        buckets, most = _buckets(several["buckets"]), several["max_shapes"]
        return DynamicModel(graph.name, program.open, self.options, most, buckets, nets)


def read_plan(path: Any) -> PlanFile:
    """Return what is in a plan file, without asking a target for anything."""
    with _naming(f"plan file {path}"):
        document, descs, blocks = _opened(path, None)
        blocks.check(document["checksums"])
        return _read(document, descs, blocks.blocks)


def _opened(path: Any, weights: Any) -> tuple[dict[str, Any], list[MemoryDesc], References]:
    """Return the document of a plan file, its formats, and its blocks."""
    container = _container(path)
    document = _checked(renewed(container.document, container.version))
    descs = descs_of(document["descs"])
    folder = None if isinstance(path, _BYTES) else path_of(path).parent
    return document, descs, References(document.get("weights"), descs, container.blocks, folder, weights)


def _read(document: Mapping[str, Any], descs: Sequence[MemoryDesc], blocks: Sequence[torch.Tensor]) -> PlanFile:
    options = options_of(document["options"], descs)
    plans = [Restored(row, descs, blocks, options) for row in document["plans"]]
    made = _texts(document["environment"])
    several = {key: document[key] for key in _OF_SEVERAL} if document["kind"] == "shapes" else None
    return PlanFile(made, differences(made, environment(options.target)), options, plans, several, descs, blocks)


@contextmanager
def _naming(source: str) -> Iterator[None]:
    """Name the file in the error of each flaw."""
    try:
        yield
    except OSError as error:
        raise PlanError(f"{source}: cannot be read: {error.strerror}") from error
    except FmtpropError as error:
        if isinstance(error, LoadError) or str(error).startswith(source):
            raise
        raise PlanError(f"{source}: {error}") from error


def _container(path: Any) -> Container:
    if isinstance(path, _BYTES):
        data = memoryview(path).cast("B")
        return Container(memoryview(bytearray(data)) if data.readonly else data, path)
    return Container(*mapped(path_of(path)))


def _loaded(path: Any, source: str, on_mismatch: str, weights: Any) -> CompiledModel | DynamicModel:
    document, descs, blocks = _opened(path, weights)
    with ThreadPoolExecutor(1) as pool:
        # the checksums take as long as all else, and need no lock of Python
        whole = pool.submit(blocks.check, document["checksums"])
        file = _read(document, descs, blocks.blocks)
        differing = file.differing
        if not differing:
            try:
                for plan in file.plans:
                    plan.build()
            except NotOfferedError as error:
                differing = [str(error)]
        whole.result()
    if not differing:
        return file.model()
    if on_mismatch == "error":
        raise PlanError(f"does not fit: {'; '.join(differing)}; load it with on_mismatch='replan', or compile again")
    warnings.warn(
        f"{source} does not fit: {'; '.join(differing)}; it is planned again from the graph inside",
        RuntimeWarning,
        stacklevel=6,
    )
    return file.planned_again()


def _buckets(given: Any) -> dict[str, dict[int, list[int]]] | None:
    """Return buckets from plain data: their names and sizes are checked where they are used."""
    try:
        return {str(name): {int(axis): sizes for axis, sizes in axes.items()} for name, axes in given.items()} or None
    except (AttributeError, ValueError) as error:
        raise PlanError(f"its buckets are malformed: {error}") from error


def _checked(document: Any) -> dict[str, Any]:
    if not isinstance(document, dict) or not set(_KEYS) <= set(document):
        raise PlanError(f"its document must have the keys {', '.join(_KEYS)}")
    for key, kind in _KEYS.items():
        if not isinstance(document[key], kind):
            raise PlanError(f"{key} of its document must be {kind.__name__}")
    if document["kind"] not in ("model", "shapes"):
        raise PlanError(f"its document has the kind {document['kind']!r}, this fmtprop knows 'model' and 'shapes'")
    is_one = document["kind"] == "model"
    if not document["plans"] or (is_one and len(document["plans"]) > 1):
        raise PlanError(f"its document has {len(document['plans'])} plans")
    if not is_one and not set(_OF_SEVERAL) <= set(document):
        raise PlanError(f"its document must have the keys {', '.join(_OF_SEVERAL)}")
    return document


def _texts(row: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value)[:200] for key, value in row.items()}


def options_of(row: Mapping[str, Any], descs: Sequence[MemoryDesc]) -> Options:
    """Return options from plain data, of which nothing is trusted."""
    given = dict(row)
    try:
        if isinstance(given.get("tune"), list):
            given["tune"] = Tune(*given["tune"])
        for key in ("boundary", "pin"):
            given[key] = {name: _desc(item, descs) for name, item in dict(given.get(key, {})).items()}
        return Options(**given)
    except (FmtpropError, TypeError, ValueError, IndexError) as error:
        raise PlanError(f"its options are malformed: {error}") from error


def _desc(item: Any, descs: Sequence[MemoryDesc]) -> MemoryDesc | str:
    return item if isinstance(item, str) else at(descs, item, "format")
