"""Modules by name, as the command line takes them: a factory in a package or a file.

Owns the meaning of such a name, and the errors of names that cannot train. A factory is the user's own code.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fmtprop.builtin import builtin_names
from fmtprop.capture.files import load, open_exported
from fmtprop.capture.torch_export import from_torch
from fmtprop.errors import GraphError, ImportModelError
from fmtprop.ir.graph import Graph
from fmtprop.ir.tensors import tensor_type, tensors_in
from fmtprop.ops.pytorch import tree_flatten, tree_leaves, tree_unflatten
from fmtprop.system.printable import first_line

_FACTORY = re.compile(r"(?P<place>[\w.]+|.+\.py):(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
_FACTORIES = (
    "package.module:factory or file.py:factory, a function without arguments that returns a module (with --input), the "
    "module and its example inputs, or also a loss"
)
_TRAINABLE = f"{_FACTORIES}; or a .pt2 of a program that torch.export.export made in train mode"


@dataclass(frozen=True)
class Made:
    """A module with the arguments of a call and the loss of its results."""

    #: in the mode in which it was made
    module: nn.Module
    inputs: tuple[Any, ...]
    loss: Callable[[Any], torch.Tensor]


def graph_named(
    model: str,
    inputs: Sequence[Sequence[int]] = (),
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    deferred: bool = False,
) -> Graph:
    """Return the graph of a model for inference: a factory's module, or what :func:`fmtprop.load` loads.

    `model`: ``package.module:factory`` or ``file.py:factory``; else a path or the name of a built-in graph. `inputs`:
    shapes of inputs, for a factory that returns only a module.

    >>> graph_named("torch.nn:PReLU", [(2, 3)]).input_nodes[0].results
    (f32[2,3],)
    """
    found = _FACTORY.fullmatch(model)
    if found is None:
        if inputs:
            raise ImportModelError(
                f"{model} has inputs of its own shapes: leave out --input, which is for {_FACTORIES}"
            )
        if model.endswith(":"):
            raise ImportModelError(f"{model} names no function behind the colon: give {_FACTORIES}")
        return load(model, shapes=shapes, deferred=deferred)
    if shapes:
        raise ImportModelError(f"--shape is for ONNX models; give {model} its inputs' shapes by --input")
    made = _made(model, inputs)
    return from_torch(made.module, made.inputs, name=found["name"])


class FlatModule(nn.Module):
    """A module for inference that takes and returns flat tensors, as its graph does.

    >>> import torch
    >>> net = FlatModule(torch.nn.Bilinear(2, 3, 4), (torch.ones(1, 2), torch.ones(1, 3)))
    >>> [result.shape for result in net(torch.ones(5, 2), torch.ones(5, 3))]
    [torch.Size([5, 4])]
    """

    def __init__(self, module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.module, self.training = module, False
        leaves, spec = tree_flatten((inputs, dict(keywords or {})))
        #: the example inputs
        self.examples = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

        def arguments(tensors: Iterable[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            given = iter(tensors)
            return tree_unflatten([next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)  # type: ignore[no-any-return]

        self._arguments = arguments

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Call the module."""
        args, kwargs = self._arguments(tensors)
        results = tree_leaves(self.module(*args, **kwargs))
        return [result for result in results if isinstance(result, torch.Tensor)]


def original(model: str, shapes: Sequence[Sequence[int]] = ()) -> FlatModule:
    """Return the module of a factory or an exported program; each call makes the same one.

    >>> [tensor.shape for tensor in original("torch.nn:PReLU", [(2, 3)]).examples]
    [torch.Size([2, 3])]
    """
    made = _made(model, shapes)
    if _FACTORY.fullmatch(model):
        made.module.eval()
    return FlatModule(made.module, made.inputs)


def original_of(graph: Graph, model: str, shapes: Sequence[Sequence[int]] = ()) -> Callable[[], FlatModule] | None:
    """Return what makes the module that a graph was imported from; None where there is none by flat tensors."""
    if not (_FACTORY.fullmatch(model) or model.lower().endswith(".pt2")):
        return None
    make = partial(original, model, tuple(map(tuple, shapes)))
    try:
        taken = [tensor_type(tensor) for tensor in make().examples]
    except (ImportModelError, GraphError):  # keyword arguments, or a tensor that no graph has
        return None
    return make if taken == [node.results[0] for node in graph.input_nodes] else None


def trainable(model: str, shapes: Sequence[Sequence[int]] = ()) -> Made:
    """Make a module for training; with seeded numbers, so that each call makes the same module.

    `model`: ``package.module:factory`` or ``file.py:factory``, or the path of a ``.pt2``.

    >>> trainable("torch.nn:PReLU", [(2, 3)]).inputs[0].shape
    torch.Size([2, 3])
    """
    made = _made(model, shapes)
    if not any(parameter.requires_grad for parameter in made.module.parameters()):
        raise ImportModelError(
            f"{model}: the module {type(made.module).__name__} has no parameter that requires gradients"
        )
    return made


def _made(model: str, shapes: Sequence[Sequence[int]]) -> Made:
    torch.manual_seed(0)
    if found := _FACTORY.fullmatch(model):
        made = _call(found["place"], found["name"], model)
    elif model.lower().endswith(".pt2"):
        made = _exported(Path(model))
    else:
        raise ImportModelError(f"{model} cannot train: {_reason(model)}. Give {_TRAINABLE}")
    return Made(*_parts(made, model, shapes))


def mean_square(results: Any) -> torch.Tensor:
    """Return the sum of the mean squares of all floating results: the loss of a factory that has none."""
    found = [tensor.float().square().mean() for tensor in tensors_in(results) if tensor.is_floating_point()]
    if not found:
        raise ImportModelError("the module has no floating-point result, so there is no loss to differentiate")
    return torch.stack(found).sum()


def _reason(model: str) -> str:
    if model in builtin_names():
        return "a built-in graph is the graph of inference, without dropout and batch statistics"
    if model.lower().endswith((".json", ".onnx")):
        return "the file has a graph of inference"
    return "it names no factory and no exported program"


def _call(place: str, name: str, model: str) -> Any:
    try:
        factory: Any = _module_at(place)
    except SyntaxError as error:
        raise ImportModelError(f"{error.filename}, line {error.lineno}: {error.msg}") from error
    except ImportModelError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ImportModelError(f"{place} cannot be imported: {_told(error)}") from error
    for part in name.split("."):
        if not hasattr(factory, part):
            near = get_close_matches(part, [one for one in dir(factory) if not one.startswith("_")])
            also = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ImportModelError(f"{model}: {place} has no {name}{also}")
        factory = getattr(factory, part)
    if isinstance(factory, nn.Module):
        raise ImportModelError(f"{model} is a module: name a function that makes it, since several are needed")
    if not callable(factory):
        raise ImportModelError(f"{model} is a {type(factory).__name__}, not a function. Give {_FACTORIES}")
    empty, variadic = inspect.Parameter.empty, (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [one.name for one in _parameters(factory) if one.default is empty and one.kind not in variadic]
    if needed:
        raise ImportModelError(
            f"{model} needs arguments ({', '.join(needed)}): write a function without arguments that calls it"
        )
    try:
        return factory()
    except Exception as error:
        raise ImportModelError(f"{model} failed: {_told(error)}") from error


def _told(error: Exception) -> str:
    """Return an error of the user's code, and its line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {first_line(error)} ({last.filename}, line {last.lineno})"


def _parameters(factory: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(factory).parameters.values())
    except ValueError:  # a function of C without a signature
        return []


def _module_at(place: str) -> ModuleType:
    if place.endswith(".py"):
        return _file(Path(place))
    here = os.getcwd()
    if here not in sys.path:  # as for python -m
        sys.path.insert(0, here)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # the user's module lacks one of its own
        raise ImportModelError(f"there is no module {error.name!r}; it must be installed, or be in {here}") from error


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ImportModelError(f"{path} is no file")
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # as for python file.py
        sys.path.insert(0, folder)
    name = f"file_{path.stem}"  # not the name of a library's module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportModelError(f"{path} cannot be imported as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _exported(path: Path) -> tuple[nn.Module, tuple[Any, ...]]:
    program = open_exported(path)
    args, kwargs = program.example_inputs or ((), {})
    if kwargs:
        raise ImportModelError(
            f"{path} has keyword arguments ({', '.join(kwargs)}): export the module with positional ones"
        )
    return program.module(), tuple(args)


def _parts(made: Any, model: str, shapes: Sequence[Sequence[int]]) -> tuple[nn.Module, tuple[Any, ...], Any]:
    module, *rest = made if isinstance(made, tuple) else (made,)
    if not isinstance(module, nn.Module) or len(rest) > 2:
        raise ImportModelError(f"{model} returns a {type(made).__name__}. Give {_FACTORIES}")
    loss = rest[1] if len(rest) == 2 else mean_square
    if rest and shapes:
        raise ImportModelError(f"{model} has example inputs of its own: leave out --input")
    if rest:
        inputs = rest[0] if isinstance(rest[0], tuple | list) else (rest[0],)
    else:
        # of the module's own data type: a module in bf16 takes no f32
        dtypes = (parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
        dtype = next(dtypes, torch.float32)
        inputs = tuple(torch.randn(tuple(shape)).to(dtype) for shape in shapes)
    if not rest and not inputs:
        raise ImportModelError(
            f"{model} returns a module without example inputs: give --input with a shape such as 8x3x224x224, or "
            "return the module and its example inputs"
        )
    return module, tuple(inputs), loss
