"""Export of a PyTorch module to an ``ExportedProgram``, in several attempts.

Derivatives that a forward pass computes are traced first, since torch.export does not trace them. Must not know graphs.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from fmtprop.archive.source_text import check_keywords
from fmtprop.capture.example_of_one import allow_one, of_two
from fmtprop.capture.export_failures import depends_on_data, export_failure
from fmtprop.capture.known_numbers import KnownNumbers
from fmtprop.capture.pytorch import FUNCTORCH, names_of_exporter, sizes_of_one, sources
from fmtprop.capture.state import attributes_kept, warn_of_state
from fmtprop.capture.torch_log import held_back
from fmtprop.capture.whole_layers import whole_layers
from fmtprop.errors import ImportModelError
from fmtprop.ir.structure import describe
from fmtprop.ops.pytorch import keystr, tree_leaves, tree_leaves_with_path, tree_map, tree_map_only
from fmtprop.system.locks import ProcessLock
from fmtprop.system.printable import first_line


def with_derivatives(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function with the calls of a module's forward pass, those of derivatives included.

    It reads the module's parameters and buffers at each call. Its calls are for the sizes of the example arguments.
    PyTorch and the module may raise anything.
    """

    def run(state: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return functional_call(module, state, args, kwargs)

    with attributes_kept(module), torch.enable_grad():
        given = (_state(module), tuple(args), dict(kwargs))
        try:
            calls = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
            is_mixed = any(str(node.kwargs.get("device")) == "meta" for node in calls.graph.nodes)
        except RuntimeError as error:
            is_mixed = "devices" in str(error)
            if not is_mixed:
                raise
        if is_mixed:  # in some forward derivatives, PyTorch mixes tensors without data up with those of device "meta"
            calls = make_fx(run)(*tree_map_only(torch.Tensor, torch.clone, given))
    for name, made in list(calls.named_buffers()):
        setattr(calls, name, made.detach())  # numbers that PyTorch made meanwhile: they are constants of the graph
    return lambda *args, **kwargs: calls(_state(module), args, kwargs)


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


_EXPORTING = ProcessLock()

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)

#: how a module is exported: (by analysis of its bytecode, which can sometimes do more than tracing an execution;
#: with examples of size 1 for dynamic sizes, which PyTorch fixes otherwise)
_ATTEMPTS = ((False, False), (False, True), (True, False))

#: warnings on which no user can act: all assigned attributes are lists of weights of recurrent layers; the others are
#: of PyTorch's own formulas of forward derivatives
_WARNINGS = (
    r"The tensor attributes? (self(\.\w+)*\._flat_weights\[\d+\](, )?)+ (was|were) assigned during export",
    r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    r"`torch.jit.script` is deprecated",
)


@contextmanager
def exporting() -> Iterator[None]:
    """Let one thread export at a time. The exporter patches torch, so two at once would break all later exports."""
    with _EXPORTING.current, held_back(), _sources_dropped(), _graphs_unprinted():
        yield


@contextmanager
def _sources_dropped() -> Iterator[None]:
    """Drop the source texts of the modules that PyTorch writes meanwhile.

    It keeps them for tracebacks until the process ends: 0.2 to 0.4 MB for each export.
    """
    kept = sources
    before = set(kept)
    try:
        yield
    finally:
        for name in kept.keys() - before:
            kept.pop(name, None)
            linecache.cache.pop(name, None)


@contextmanager
def _graphs_unprinted() -> Iterator[None]:
    """Keep the exporter from printing the graph that it has when it fails: the error is one line."""
    names = names_of_exporter()
    names["print"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        names.pop("print", None)  # Python's own again


def export(module: nn.Module, example_inputs: Any, kwargs: dict[str, Any], dynamic_shapes: Any) -> ExportedProgram:
    """Return the exported program of a module.

    Raises ImportModelError if the module cannot be exported, or an example or parameter is no plain CPU tensor.
    """
    args = positional(module, example_inputs, kwargs)
    check_tensors(dict([*module.named_parameters(), *module.named_buffers()]))
    check_tensors(_named_leaves(args, kwargs))
    check_keywords(kwargs)
    # torch's error about a key that a graph cannot hold is not helpful
    try:
        describe([], [], tree_map(lambda leaf: None, (args, kwargs)))
    except (AssertionError, AttributeError, TypeError, ValueError) as error:  # of a container's own class
        raise ImportModelError(
            f"the example inputs have a container that takes nothing but tensors, such as a PackedSequence "
            f"({first_line(error)}): pass its tensors, or use torch.compile(module, backend='fmtprop')"
        ) from error
    if dynamic_shapes is not None and (twice := of_two(module, args, kwargs, dynamic_shapes)) is not None:
        with suppress(ImportModelError):  # such as a sum with an axis of one that is not marked
            program = _program(module, *twice, dynamic_shapes)
            allow_one(program, (args, kwargs))
            return program
    return _program(module, args, kwargs, dynamic_shapes)


def _program(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any) -> ExportedProgram:
    args, kwargs = _separated(args), _separated(kwargs)
    named = _with_names(module, args, kwargs, dynamic_shapes)
    with (
        attributes_kept(module),  # of the two blocks that follow, too: an interrupt may come at any time
        _eval_mode(module),
        torch.no_grad(),
        held_back(),
        warnings.catch_warnings(),
        named as dynamic_shapes,
    ):
        for text in _WARNINGS:
            warnings.filterwarnings("ignore", text)
        state = set[str]()
        with attributes_kept(module) as changed:
            program = _exported(module, args, kwargs, dynamic_shapes, lambda *_: state.update(changed()))
        if state:
            warn_of_state(module, args, kwargs)
        return program


def _exported(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any, after: Callable[..., None]
) -> ExportedProgram:
    """Return the program of the first attempt that succeeds; `after` is called behind a forward pass in Python."""
    failures: list[Exception] = []
    for strict, ones_are_sizes in _ATTEMPTS:
        if ones_are_sizes and dynamic_shapes is None:
            continue
        if strict and dynamic_shapes is None and not depends_on_data(failures[0]):
            with suppress(Exception):
                return _exported_with_derivatives(module, args, kwargs, after)
        watched = nullcontext() if strict else module.register_forward_hook(after)
        numbers = KnownNumbers(module)
        known = nullcontext() if strict else module.register_forward_pre_hook(numbers.begin)
        data = nullcontext() if strict else _Unseen(numbers)
        sizes = sizes_of_one(ones_are_sizes)
        try:
            with sizes, data, watched, known, whole_layers():
                program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=strict)
        except Exception as error:  # the exporter runs the user's code: it raises anything
            failures.append(error)
            rows = None if len(failures) > 1 or "view" not in str(error) else _in_rows((args, kwargs))
            if rows is not None:  # PyTorch's rules for shapes keep strides where its kernels do not
                with suppress(ImportModelError):
                    return _exported(module, rows[0], rows[1], dynamic_shapes, after)
            continue
        if dynamic_shapes is None and _has_transforms(program):
            with suppress(Exception):
                return _exported_with_derivatives(module, args, kwargs, after)
        return program
    raise ImportModelError(export_failure(module, failures[0])) from failures[0]


def _in_rows(arguments: Any) -> Any:
    """Return arguments with row-major tensors; None if all are."""
    leaves = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    if all(leaf.is_contiguous() for leaf in leaves):
        return None
    return tree_map_only(torch.Tensor, lambda leaf: leaf.clone(memory_format=torch.contiguous_format), arguments)


def _exported_with_derivatives(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], after: Callable[..., None]
) -> ExportedProgram:
    with module.register_forward_hook(after), _forward(module, with_derivatives(module, args, kwargs)):
        return torch.export.export(module, args, kwargs, strict=False)


def _has_transforms(program: ExportedProgram) -> bool:
    """Return whether a program has calls of transforms, which are none of tensors, or lost all its results."""
    functions = (node.target for node in program.graph.nodes if node.op == "call_function")
    results = program.graph_signature.output_specs
    are_none = all(getattr(one.arg, "value", one) is None for one in results)
    return are_none or any(getattr(one, "__module__", "").startswith(FUNCTORCH) for one in functions)


class _Unseen(TorchFunctionMode):
    """Trace what torch.export does not see.

    ``tensor.data`` is its detached self, and an assignment to it a copy. An assignment at a position that is a tensor
    is a copy to the view of this position. A number of a buffer is known.
    """

    def __init__(self, numbers: KnownNumbers) -> None:
        super().__init__()
        self._numbers = numbers

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        data: Any = torch.Tensor.data
        if func == data.__get__:
            return args[0].detach()
        if func == data.__set__:
            return args[0].detach().copy_(args[1])
        if func == torch.Tensor.__setitem__ and _is_position(args[1]):
            view = _at_position(args[0], args[1])
            return view.copy_(args[2]) if isinstance(args[2], torch.Tensor) else view.fill_(args[2])
        kwargs = kwargs or {}
        return self._numbers.call(func, args, kwargs) if self._numbers.are_read(args, kwargs) else func(*args, **kwargs)


def _is_position(index: Any) -> bool:
    """Return whether an index makes a view at a position that is an integer tensor."""
    items = index if isinstance(index, tuple) else (index,)
    tensors = [item for item in items if isinstance(item, torch.Tensor)]
    are_positions = all(item.ndim == 0 and item.dtype in _INTEGERS for item in tensors)
    others = {type(item) for item in items if not isinstance(item, torch.Tensor)}
    return bool(tensors) and are_positions and others <= {int, slice, EllipsisType, type(None)}


def _at_position(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Return the view that such an index makes."""
    items = index if isinstance(index, tuple) else (index,)
    view = tensor[tuple(slice(None) if isinstance(item, torch.Tensor) else item for item in items)]
    rest = tensor.ndim - sum(item is not None and item is not ... for item in items)
    axis = view.ndim if any(item is ... for item in items) else view.ndim - rest
    for item in reversed(items):
        axis -= rest if item is ... else not isinstance(item, int)
        if isinstance(item, torch.Tensor):
            view = view.select(axis, item.item())  # type: ignore[arg-type]
    return view


def positional(module: nn.Module, example_inputs: Any, kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return example inputs as positional arguments, with which the module can be called."""
    if example_inputs is None:
        args: tuple[Any, ...] = ()
    elif isinstance(example_inputs, tuple | list):
        args = tuple(example_inputs)
    else:
        args = (example_inputs,)
    signature = inspect.signature(module.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ImportModelError(
            f"{type(module).__name__}.forward{signature} cannot be called with the example inputs: {error}. "
            "example_inputs is a tensor or a tuple of the positional arguments, kwargs the keyword arguments"
        ) from error
    return args


@contextmanager
def _with_names(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Any) -> Iterator[Any]:
    """Yield dynamic shapes with an entry for each argument, as torch.export wants them.

    It cannot assign any to arguments that a parameter ``**kwargs`` takes, so each of these becomes a parameter for now.
    """
    signature = inspect.signature(module.forward)
    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    known = {p.name for p in parameters}
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs if name not in known]
    if isinstance(shapes, Mapping):
        given = [name for name in signature.bind(*args, **kwargs).arguments if name in known]
        entries = {name: shapes.get(name) for name in (*given, *kwargs)}
        shapes = shapes if set(shapes) - set(entries) else entries  # torch.export's error has names that are none
    if shapes is None or not more:
        yield shapes
        return

    with _forward(module, module.forward, signature.replace(parameters=[*parameters, *more])):
        yield shapes


@contextmanager
def _forward(
    module: nn.Module, calls: Callable[..., Any], signature: inspect.Signature | None = None
) -> Iterator[None]:
    """Let a module's forward pass be a function for now, with the signature of its own or another one."""
    own = {name: value for name, value in vars(module).items() if name == "forward"}

    @functools.wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return calls(*args, **kwargs)

    if signature is not None:
        forward.__signature__ = signature  # type: ignore[attr-defined]
    try:
        vars(module)["forward"] = forward  # not setattr: a class may have its own meaning of it
        yield
    finally:
        vars(module).pop("forward", None)
        vars(module).update(own)


def _named_leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        leaves = tree_leaves_with_path((tuple(args), dict(kwargs)))
    except ValueError as error:  # a class that is registered without names of its members
        raise ImportModelError(f"example inputs: {error} Or use a tuple, a list, a dict or a dataclass") from error
    return {f"example input {keystr(path[1:])}": leaf for path, leaf in leaves}


def _separated(tree: Any) -> Any:
    # The exporter makes one input of two arguments that are the same tensor object, and so would the graph.
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), tree)


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    # Not module.eval(): some models do more in it (such as fusing branches), others refuse it.
    training = [child for child in module.modules() if child.training]
    try:
        for child in training:
            child.training = False
        yield
    finally:
        for child in training:
            child.training = True


def check_tensors(tensors: Mapping[str, Any]) -> None:
    """Refuse tensors that are not dense CPU tensors."""
    for name, tensor in tensors.items():
        if isinstance(tensor, np.ndarray):
            raise ImportModelError(f"{name} is a numpy.ndarray; fmtprop takes tensors: use torch.from_numpy")
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.device.type != "cpu":
            raise ImportModelError(f"{name} is on device {tensor.device}; fmtprop runs on the CPU: use .to('cpu')")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            raise ImportModelError(
                f"{name} is a {tensor.layout} tensor{' (quantized)' if tensor.is_quantized else ''}; "
                "only dense, unquantized tensors can be imported: use .to_dense() or .dequantize()"
            )
