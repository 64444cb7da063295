"""Specialisation of an exported program with symbolic sizes: the same program for sizes that are numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import TensorArgument
from torch.fx.node import map_arg

from fmtprop.capture.fx_import import Calls, placeholders
from fmtprop.capture.program_import import user_inputs
from fmtprop.capture.pytorch import detect_fake_mode
from fmtprop.capture.run_time_checks import reads_a_number
from fmtprop.errors import ImportModelError, InputError
from fmtprop.ops.pytorch import FakeTensor, FakeTensorMode, HigherOrderOperator, OpOverload

#: PyTorch's folder, and the parts of it that compute types and strides of results
_TORCH = Path(torch.__file__).parent
_TYPES = ("_decomp", "_meta_registrations.py", "_prims", "_prims_common", "_refs", "_subclasses")

#: elements of a tensor that is computed during an import, since the model reads a number from it: a few milliseconds
_MOST_COMPUTED = 1 << 20


class Sizes:
    """The sizes that the inputs of an exported program may have.

    `program`: its placeholders record their sizes, as numbers or as expressions of symbols.
    """

    def __init__(self, program: ExportedProgram) -> None:
        recorded = {node.name: node.meta.get("val") for node in placeholders(program)}
        #: name and recorded tensor of each input
        self.inputs: list[tuple[str, torch.Tensor]] = []
        for spec in user_inputs(program):
            value = recorded.get(spec.arg.name)
            if isinstance(spec.arg, TensorArgument) and isinstance(value, torch.Tensor):
                self.inputs.append((spec.arg.name, value))
        self._ranges = program.range_constraints
        #: relations of sizes, as sympy has them, that decided the branches of the traced model
        self.relations = _relations(value for _, value in self.inputs)

    @property
    def are_fixed(self) -> bool:
        """Whether no size is symbolic."""
        return not self.symbols

    @property
    def symbols(self) -> list[Any]:
        """The sizes that are symbolic."""
        return [size for _, value in self.inputs for size in value.shape if not isinstance(size, int)]

    @property
    def hints(self) -> list[torch.Tensor]:
        """Tensors without data, of the sizes of the export's examples."""
        # int() of a symbol would fix it
        sizes = [[s if isinstance(s, int) else s.node.hint for s in value.shape] for _, value in self.inputs]
        types = [value.dtype for _, value in self.inputs]
        return [torch.empty(size, dtype=dtype, device="meta") for size, dtype in zip(sizes, types, strict=True)]

    def small(self, given: Sequence[torch.Tensor]) -> tuple[tuple[int, int, int], ...]:
        """Return input, axis and size where a size that may change, or its symbol, is 0 or 1: export takes no part.

        Raises InputError for what is no tensor of as many axes.
        """
        self._check_axes(given)
        shapes = zip((recorded.shape for _, recorded in self.inputs), (tensor.shape for tensor in given), strict=True)
        pairs: list[list[tuple[Any, int]]] = [list(zip(*both, strict=False)) for both in shapes]
        return tuple(
            (index, axis, size)
            for index, sizes in enumerate(pairs)
            for axis, (symbol, size) in enumerate(sizes)
            if not isinstance(symbol, int) and (size <= 1 or _solved(symbol.node.expr, size)[1] in (0, 1))
        )

    def check(self, given: Sequence[torch.Tensor], *, branches: bool = True) -> None:
        """Refuse tensors with sizes that the program was not exported for.

        `branches`: whether to ask also for the branches that the export took.
        """
        self._check_axes(given)
        bound: dict[Any, tuple[int, str]] = {}
        related: list[tuple[str, Any, int]] = []
        for (name, recorded), tensor in zip(self.inputs, given, strict=True):
            sizes: list[tuple[Any, int]] = list(zip(recorded.shape, tensor.shape, strict=True))
            for axis, (expected, size) in enumerate(sizes):
                where = f"input {name} axis {axis}"
                if isinstance(expected, int):
                    self._check_fixed(expected, size, where, "mark it in dynamic_shapes")
                    continue
                expression = expected.node.expr
                if not expression.free_symbols:
                    self._check_fixed(int(expression), size, where, "the model itself takes no other size")
                    continue
                symbol, number = _solved(expression, size)
                if symbol is None or symbol in bound:
                    related.append((where, expression, size))
                    continue
                if number is None:
                    raise InputError(f"{where}: got {size}, but it must be {expression} for a whole number {symbol}")
                bound[symbol] = (number, where if expression.is_Symbol else f"{where} as {expression}")
                self._check_range(symbol, number, where, expression)
        numbers = {symbol: size for symbol, (size, _) in bound.items()}
        for where, expression, size in related:
            if (wanted := expression.subs(numbers)) != size and not wanted.free_symbols:
                others = ", ".join(place for symbol, (_, place) in bound.items() if symbol in expression.free_symbols)
                raise InputError(f"{where}: got {size}, but it must be {wanted} because of {others}")
        for guard in self.relations if branches else ():
            if guard.subs(numbers) == False:  # noqa: E712 - sympy's own, and an open relation is no failure
                places = {symbol: type(symbol)(f"({place})") for symbol, (_, place) in bound.items()}
                raise InputError(
                    f"{', '.join(f'{place}: got {size}' for size, place in bound.values())}: the model takes another "
                    f"branch there than for the example inputs, which have {guard.subs(places)}; compile it with "
                    "example inputs of such a size, too"
                )

    def _check_axes(self, given: Sequence[object]) -> None:
        """Refuse what is no tensor of as many axes as the program's input."""
        if len(given) != len(self.inputs):
            raise InputError(f"the model takes {len(self.inputs)} tensors, got {len(given)}")
        for (name, recorded), tensor in zip(self.inputs, given, strict=True):
            if not isinstance(tensor, torch.Tensor):
                remedy = f"; pass torch.from_numpy({name})" if isinstance(tensor, np.ndarray) else ""
                raise InputError(f"input {name} must be a torch.Tensor, got {type(tensor).__name__}{remedy}")
            if tensor.ndim != recorded.ndim:
                raise InputError(f"input {name}: expected a tensor of {recorded.ndim} axes, got {tuple(tensor.shape)}")

    @staticmethod
    def _check_fixed(expected: int, size: int, where: str, why: str) -> None:
        if size != expected:
            raise InputError(f"{where}: got {size}, but it must be {expected}, which is fixed: {why}")

    def _check_range(self, symbol: Any, number: int, where: str, expression: Any) -> None:
        allowed = self._ranges.get(symbol)
        # PyTorch begins the range of a symbol in an expression at 2, whatever the caller's is
        if allowed is None or ((allowed.lower <= number or not expression.is_Symbol) and number <= allowed.upper):
            return
        got, low, high = (expression.xreplace({symbol: one}) for one in (number, allowed.lower, allowed.upper))
        raise InputError(
            f"{where}: got {got}, but the model was exported for {low} to {high}; "
            "give another range in dynamic_shapes, or example inputs of such a size"
        )


def _solved(expression: Any, size: Any) -> tuple[Any, Any]:
    """Return the symbol of a linear expression and its number for a size: (None, None) for another expression.

    The number is None where no whole number gives the size.
    """
    if expression.is_Symbol:
        return expression, size
    if len(expression.free_symbols) != 1:
        return None, None
    (symbol,) = expression.free_symbols
    start = expression.xreplace({symbol: 0 * symbol})
    step = expression.xreplace({symbol: symbol**0}) - start
    if not step or expression != step * symbol + start:
        return None, None
    return symbol, (int((size - start) / step) if not (size - start) % step else None)


def _relations(values: Iterable[torch.Tensor]) -> list[Any]:
    modes = (value.fake_mode for value in values if isinstance(value, FakeTensor))
    shapes = next((mode.shape_env for mode in modes if mode.shape_env is not None), None)
    return [] if shapes is None else [guard.expr for guard in shapes.guards if not _is_of_types(guard)]


def _is_of_types(guard: Any) -> bool:
    """Return whether PyTorch asked for the strides of a result, which are computed anew for other sizes."""
    place = guard.sloc.framework_loc
    file = Path(getattr(place, "filename", None) or str(place))
    return file.is_relative_to(_TORCH) and file.relative_to(_TORCH).parts[0] in _TYPES


def specialised(program: ExportedProgram, given: Sequence[torch.Tensor]) -> ExportedProgram:
    """Return a program for the sizes of some inputs.

    Raises InputError if the program was not exported for these sizes.
    """
    Sizes(program).check(given)
    names = [spec.arg.name for spec in user_inputs(program) if isinstance(spec.arg, TensorArgument)]
    recorded = [node.meta.get("val") for node in placeholders(program)]
    mode = detect_fake_mode(recorded) or FakeTensorMode()
    known: dict[str, Any]
    with mode:
        known = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in zip(names, given, strict=True)}
    made = copy.copy(program)
    walk = _Specialiser(program.graph, known, mode, constants_of(program))
    made._graph_module = _Calls(program.graph_module, walk.graph)  # type: ignore[assignment]
    return made


def constants_of(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Return the tensors that the model's own code makes (``torch.tensor(3)``), by placeholder."""
    targets = program.graph_signature.inputs_to_lifted_tensor_constants
    return {name: program.constants[target] for name, target in targets.items()}


def reads_constants(program: ExportedProgram) -> bool:
    """Return whether a program reads numbers from tensors that do not depend on its inputs."""
    constant = dict.fromkeys(node for node in program.graph.nodes if node.name in constants_of(program))
    for node in program.graph.nodes:
        if node.op == "call_function" and all(source in constant for source in node.all_input_nodes):
            if reads_a_number(node):
                return True
            constant[node] = None
    return False


class _Calls:
    """A graph with the attributes of a module; an ``fx.GraphModule`` would write and compile Python code for it."""

    def __init__(self, module: fx.GraphModule, graph: fx.Graph) -> None:
        self._module, self.graph = module, graph

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def specialised_module(module: fx.GraphModule, given: Sequence[Any]) -> Calls:
    """Return a functional graph for the sizes of some inputs; any number of threads may call this.

    `given`: one tensor or number for each placeholder; of a tensor, only its type, shape and strides are read. Raises
    ImportModelError if a call fails for these sizes.

    ``make_fx`` would do, but while it traces, all calls of compiled functions in other threads raise.
    """
    mode = FakeTensorMode()
    known = dict(zip((node.name for node in placeholders(module)), given, strict=True))
    known |= {node.name: attrgetter(node.target)(module) for node in module.graph.nodes if node.op == "get_attr"}
    fake = {name: mode.from_tensor(one) if isinstance(one, torch.Tensor) else one for name, one in known.items()}
    return _Calls(module, _Specialiser(module.graph, fake, mode).graph)


class _Symbols:
    """The numbers of an exporter's symbols.

    `mode`: the mode of tensors without data.
    """

    def __init__(self, graph: fx.Graph, given: Mapping[str, Any], mode: FakeTensorMode) -> None:
        self._mode = mode
        self._numbers: dict[Any, Any] = {}
        self._known: dict[Any, int | float | bool | None] = {}
        #: tensors without data are the same for all calls: making one takes a tenth of a millisecond
        self._tensors: dict[object, torch.Tensor] = {}
        for node in graph.nodes:
            recorded, value = node.meta.get("val"), given.get(node.name)
            if node.op != "placeholder" or value is None:
                continue
            if isinstance(recorded, torch.Tensor) and isinstance(value, torch.Tensor):
                for symbol, size in zip(recorded.shape, value.shape, strict=True):
                    self._bind(symbol, size)
            else:
                self._bind(recorded, value)

    def _bind(self, symbol: Any, number: Any) -> None:
        import sympy  # type: ignore[import-untyped]  # 30 MB, which compiling without symbols must not load

        if isinstance(symbol, torch.SymInt | torch.SymFloat):
            name, found = _solved(symbol.node.expr, sympy.sympify(number))
            if name is not None and found is not None:
                self._numbers[name] = sympy.sympify(found)

    def number(self, value: Any) -> int | float | bool | None:
        """Return a number; None if it depends on data."""
        if isinstance(value, int | float):
            return value
        expression = value.node.expr
        if expression not in self._known:
            found = expression.xreplace(self._numbers)
            kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
            self._known[expression] = None if found.free_symbols else kind(found)
        return self._known[expression]

    def learn(self, symbol: Any, number: Any) -> None:
        """Take a number for the symbol of one that is read from a tensor."""
        self._bind(symbol, number)
        self._known = {expression: known for expression, known in self._known.items() if known is not None}

    def value(self, recorded: Any) -> Any:
        """Return a recorded value with numbers in place of symbols; None if it is none, or depends on data."""
        if isinstance(recorded, list | tuple):
            several = [self.value(one) for one in recorded]
            return None if any(one is None for one in several) else several
        if isinstance(recorded, torch.SymInt | torch.SymFloat | torch.SymBool | int | float):
            return self.number(recorded)
        return self._tensor(recorded) if isinstance(recorded, torch.Tensor) else None

    def _tensor(self, recorded: torch.Tensor) -> torch.Tensor | None:
        sizes: list[Any] = [self.number(one) for one in recorded.shape]
        strides: list[Any] = [self.number(one) for one in recorded.stride()]
        start: Any = self.number(recorded.storage_offset())
        if recorded.layout is not torch.strided or None in (*sizes, *strides, start):
            return None
        key = tuple(sizes), tuple(strides), start, recorded.dtype, recorded.device
        if key not in self._tensors:
            # under the mode, PyTorch would take a fifth of a millisecond
            data = torch.empty_strided(sizes, strides, dtype=recorded.dtype, device="meta")
            if start:
                whole = torch.empty(start + data.untyped_storage().nbytes(), dtype=recorded.dtype, device="meta")
                data = whole.as_strided(sizes, strides, start)
            self._tensors[key] = FakeTensor(self._mode, data, recorded.device)
        return self._tensors[key]


class _Specialiser:
    """One walk over a program. A node is copied with numbers in place of symbols, or becomes a number.

    `constants`: numbers of placeholders that are the same in all calls.
    """

    def __init__(
        self,
        graph: fx.Graph,
        given: dict[str, Any],
        mode: FakeTensorMode,
        constants: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        self.graph = fx.Graph()
        self._given, self._symbols, self._mode = given, _Symbols(graph, given, mode), mode
        self._constants = constants
        self._made: dict[fx.Node, Any] = {}
        #: what calls of the new graph compute without any input
        self._computed: dict[fx.Node, torch.Tensor | None] = {}
        with torch.no_grad():
            for node in graph.nodes:
                self._made[node] = self._specialise(node)

    def _specialise(self, node: fx.Node) -> Any:
        if node.op == "call_function" and not isinstance(node.target, HigherOrderOperator):
            return self._call(node)
        made = self.graph.node_copy(node, self._made.__getitem__) if node.op != "output" else self._output(node)
        made.name = node.name  # a new graph renames nodes with the name of a builtin
        if node.name not in self._given:
            return made
        made.meta["val"] = value = self._given[node.name]
        return value if isinstance(value, int | float) else made

    def _output(self, node: fx.Node) -> fx.Node:
        made: fx.Node = self.graph.output(map_arg(node.args[0], self._made.__getitem__))
        return made

    def _call(self, node: fx.Node) -> Any:
        args, kwargs = map_arg((node.args, node.kwargs), self._made.__getitem__)
        value = self._symbols.value(node.meta.get("val"))
        if value is None and reads_a_number(node):
            tensor = self._computed_by(self._made[node.all_input_nodes[0]])
            if tensor is not None:
                value = tensor.item()
                self._symbols.learn(node.meta.get("val"), value)
        if value is None:
            value = self._called(node, args, kwargs)
        if value is None or isinstance(value, int | float):
            return value  # a size, or a check of sizes that holds
        made = self.graph.create_node("call_function", node.target, args, kwargs, node.name)
        made.meta = {**node.meta, "val": value}
        return made

    def _computed_by(self, made: fx.Node) -> torch.Tensor | None:
        """Return what a call of the new graph computes; None if it depends on inputs or chance, or is large."""
        if made not in self._computed:
            self._computed[made] = self._compute(made)
        return self._computed[made]

    def _compute(self, made: fx.Node) -> torch.Tensor | None:
        value, target = made.meta.get("val"), made.target
        if not isinstance(value, torch.Tensor) or value.numel() > _MOST_COMPUTED:
            return None
        if made.op == "placeholder":
            return self._constants.get(made.name)
        if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
            return None
        operands = {source: self._computed_by(source) for source in made.all_input_nodes}
        if any(operand is None for operand in operands.values()):
            return None
        args, kwargs = map_arg((made.args, made.kwargs), operands.__getitem__)
        found: torch.Tensor = target(*args, **kwargs)
        return found

    def _called(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Return the result of a call on tensors without data: where it is not recorded, or its sizes are not known."""
        known = map_arg((args, kwargs), lambda made: made.meta["val"])
        try:
            with self._mode:
                return node.target(*known[0], **known[1])  # type: ignore[operator]
        except Exception as error:  # a size that depends on data, or that the model's own checks refuse
            raise ImportModelError(f"{node.name}: {node.target} fails for these sizes: {error}") from error
