"""Loading a plan file: where it fits this machine it is restored, else planned again from the graph inside."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pickle import PickleBuffer
from typing import Any

import torch

from fmtprop import dnnl
from fmtprop.compiling.compiled import CompiledModel
from fmtprop.compiling.options import Options, Tune
from fmtprop.compiling.restored import Restored
from fmtprop.errors import FmtpropError, LoadError, PlanError, UnsupportedOpError
from fmtprop.layout import MemoryDesc
from fmtprop.planfile.container import Container, mapped
from fmtprop.planfile.descs import descs_of
from fmtprop.planfile.environment import differences, environment
from fmtprop.planfile.rebuild import NotOfferedError
from fmtprop.runtime.threads import on_cpu
from fmtprop.system import collector
from fmtprop.system.files import path_of

#: what to do with a plan that was made for another machine, library or number of threads
MISMATCHES = ("replan", "error")

#: what holds the bytes of a plan file
_BYTES = bytes | bytearray | memoryview | PickleBuffer

_KEYS = {"kind": str, "environment": dict, "options": dict, "plans": list, "descs": list, "checksums": list}


def load_plan(path: Any, on_mismatch: str = "replan") -> CompiledModel:
    """Return the model of a plan file.

    Parameters
    ----------
    path : str, path or bytes
        A file from :meth:`CompiledModel.save <fmtprop.CompiledModel.save>` or from any source: nothing in it is
        trusted, and nothing is executed. It is mapped, so processes that load it share the memory of its weights; while
        one of them runs, the file may be replaced or removed, but not be written in place. Bytes of such a file work,
        too.
    on_mismatch : {"replan", "error"}
        What to do if the plan does not fit here. It fits if the versions of fmtprop, PyTorch and oneDNN, the
        instruction set, the number of threads and the CPU's caches are those of the machine that made it. Otherwise
        ``"replan"`` plans it again from the graph in the file, with a warning that says what differs, and ``"error"``
        raises PlanError.

    Returns
    -------
    CompiledModel
        Where the plan fits: the same implementations in the same formats, with equal bits as results. Nothing is
        measured, and no plans are compared.

    Raises
    ------
    PlanError
        The file cannot be read, is no plan file of a known version, is damaged, or does not fit with ``"error"``.

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
        return dnnl.after_fork(lambda: _loaded(_container(path), source, on_mismatch))


@dataclass(frozen=True)
class PlanFile:
    """A plan file, read but not built: for display.

    Parameters
    ----------
    environment : dict of str to str
        What the plan was made for.
    differing : list of str
        What differs from that here.
    options : Options
        How it was compiled.
    plans : list of Restored
        The plans, without implementations.
    """

    environment: dict[str, str]
    differing: list[str]
    options: Options
    plans: list[Restored]


def read_plan(path: Any) -> PlanFile:
    """Return what is in a plan file, without asking a target for anything.

    Raises
    ------
    PlanError
        As for :func:`load_plan`.
    """
    with _naming(f"plan file {path}"):
        container = _container(path)
        document = _checked(container.document)
        container.check_blocks(document["checksums"])
        return _read(container, document)


def _read(container: Container, document: Mapping[str, Any]) -> PlanFile:
    descs = descs_of(document["descs"])
    options = options_of(document["options"], descs)
    plans = [Restored(row, descs, container.blocks, options) for row in document["plans"]]
    made = _texts(document["environment"])
    return PlanFile(made, differences(made, environment(options.target)), options, plans)


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


def _loaded(container: Container, source: str, on_mismatch: str) -> CompiledModel:
    document = _checked(container.document)
    with ThreadPoolExecutor(1) as pool:
        # the checksums take as long as all else, and needs no lock of Python
        whole = pool.submit(container.check_blocks, document["checksums"])
        file = _read(container, document)
        differing = file.differing
        if not differing:
            try:
                for plan in file.plans:
                    plan.build()
            except NotOfferedError as error:
                differing = [str(error)]
        whole.result()
    if not differing:
        return CompiledModel(file.plans[0])
    if on_mismatch == "error":
        raise PlanError(f"does not fit: {'; '.join(differing)}; load it with on_mismatch='replan', or compile again")
    warnings.warn(
        f"{source} does not fit: {'; '.join(differing)}; it is planned again from the graph inside",
        RuntimeWarning,
        stacklevel=6,
    )
    return _replanned(file.plans[0], file.options)


def _replanned(plan: Restored, options: Options) -> CompiledModel:
    from fmtprop.compiling.from_graph import compile_graph  # all of a compilation, which a plan that fits does without

    graph = plan.inside()
    pins = {name: desc for name, desc in options.pin.items() if name.rpartition(".")[0] in graph}
    return compile_graph(graph, replace(options, pin=pins), owned=True)


def _checked(document: Any) -> dict[str, Any]:
    if not isinstance(document, dict) or not set(_KEYS) <= set(document):
        raise PlanError(f"its document must have the keys {', '.join(_KEYS)}")
    for key, kind in _KEYS.items():
        if not isinstance(document[key], kind):
            raise PlanError(f"{key} of its document must be {kind.__name__}")
    if document["kind"] != "model" or len(document["plans"]) != 1:
        raise PlanError(f"its document has the kind {document['kind']!r}, this fmtprop knows 'model'")
    return document


def _texts(row: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value)[:200] for key, value in row.items()}


def options_of(row: Mapping[str, Any], descs: Sequence[MemoryDesc]) -> Options:
    """Return options from plain data, of which nothing is trusted.

    Raises
    ------
    PlanError
        An option is unknown or has a wrong value.
    """
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
    if isinstance(item, str):
        return item
    if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < len(descs):
        raise PlanError(f"there is no format {item!r}")
    return descs[item]
