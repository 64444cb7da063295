"""A session: an ONNX model, planned for each set of input shapes that it is called with.

A thin layer over :class:`~fmtprop.compiling.compiled.CompiledModel`. It must not know the meaning of nodes.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from fmtprop.compiling.ahead import cases
from fmtprop.compiling.compiled import CompiledModel
from fmtprop.compiling.from_graph import compile_graph
from fmtprop.compiling.options import Options
from fmtprop.compiling.plans import Plans
from fmtprop.compiling.shapes import Shapes
from fmtprop.errors import ImportModelError, InputError, ShapeError, UnsupportedOpError
from fmtprop.onnx.arrays import NodeArg, node_arg, reader_of, value_of, written
from fmtprop.onnx.model import deciding_inputs, open_program
from fmtprop.runtime.threads import on_cpu
from fmtprop.system.collector import paused

if TYPE_CHECKING:
    from fmtprop.onnx.model.graph import Split

#: number of plans that a session keeps, the most recently used ones
MAX_SHAPES: Final = 8

#: shapes that cannot be planned and are not tried again: each attempt takes a tenth of a second and more
_MOST_UNPLANNED: Final = 64

_LOG: Final = logging.getLogger("fmtprop")

_Shapes = tuple[tuple[int, ...], ...]

#: the shapes of all inputs, and the numbers of those that decide which nodes run
_Case = tuple[tuple[int | tuple[int, ...], ...], ...]


class _CasePlan(NamedTuple):
    """A plan of the model; of its first nodes, if there is a split."""

    net: CompiledModel
    split: Split | None


@dataclass(frozen=True)
class ModelMetadata:
    """A file's data about its model.

    Parameters
    ----------
    producer_name, graph_name, domain, description, graph_description : str
        As in the file; empty if it is silent.
    version : int
        Version of the model.
    custom_metadata_map : dict of str to str
        The model's own properties.
    """

    producer_name: str
    graph_name: str
    domain: str
    description: str
    graph_description: str
    version: int
    custom_metadata_map: dict[str, str]


class InferenceSession:
    """An ONNX model that is run by names.

    A plan is made for each set of shapes, and the last 8 are kept. With so many, another shape runs node by node in
    PyTorch until its third run, when it takes a plan's place (not with ``deterministic=True``, nor a model with weights
    in bytes, which PyTorch multiplies slowly). If a scalar input (a whole number, a boolean)
    decides which branch is taken or how often a loop runs, there is a plan for each of its values, of those nodes
    alone; with more than `max_shapes` values, it is an input like others. Nodes that a plan cannot express (shapes
    that depend on data, sequences, strings), and those that read their results, run node by node in PyTorch behind the
    plan of all others: a warning in the log "fmtprop" and :attr:`reason` say why. If none of the others is
    compute-intensive, the whole model does, as one with 16-bit float inputs, which has PyTorch's rounding.

    Parameters
    ----------
    path_or_bytes : str, path, bytes or onnx.ModelProto
        The model.
    sess_options : onnxruntime.SessionOptions, optional
        For programs that were written for ONNX Runtime. They describe its optimiser, and are ignored. A number of
        threads that is not PyTorch's gets a warning, because sessions run with ``torch.get_num_threads()`` threads.
    providers : sequence of str or of (str, mapping), optional
        For such programs, too: must have ``"CPUExecutionProvider"``.
    provider_options : sequence of mapping, optional
        Ignored.
    max_shapes : int
        Plans that are kept, one per combination of input shapes; the one that was used longest ago goes first, at the
        third run of a shape without one.
    shapes : mapping of str to sequence, optional
        Shapes that are planned when the session is made: sizes by input, each a number or a range, such as
        ``{"x": (1, 3, 48, (320, 640, 32))}``: from 320 to 640 in steps of 32.
    **options : object
        Of :func:`fmtprop.compile`: ``policy``, ``dtype``, ``tune``, ….

    Raises
    ------
    ImportModelError
        The model is invalid, or has an operator that is not supported.
    UnsupportedOpError
        There is no such option.
    InputError
        `shapes` does not fit the inputs, or has more combinations than plans are kept.

    Examples
    --------
    >>> import numpy as np, onnx
    >>> from fmtprop.onnx import InferenceSession
    >>> model = onnx.parser.parse_model('''
    ...     <ir_version: 8, opset_import: ["" : 17]>
    ...     g (float[n, 2] x) => (float[n, 2] y) { y = Relu(x) }''')
    >>> session = InferenceSession(model, policy="propagate")
    >>> session.get_inputs()[0]
    NodeArg(name='x', type='tensor(float)', shape=['n', 2])
    >>> session.run(None, {"x": np.float32([[-1, 2]])})
    [array([[0., 2.]], dtype=float32)]
    """

    def __init__(
        self,
        path_or_bytes: object,
        sess_options: Any = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[Any] | None = None,
        *,
        max_shapes: int = MAX_SHAPES,
        shapes: Mapping[str, Sequence[int | tuple[int, int, int]]] | None = None,
        **options: Any,
    ) -> None:
        _check_providers(providers)
        _check_threads(sess_options)
        known = sorted(field.name for field in fields(Options))
        for name in options.keys() - set(known):
            raise UnsupportedOpError(f"a session has no option {name!r}; it has max_shapes, {', '.join(known)}")
        #: what a pickle has: the path of the model, and the other arguments
        self._given: tuple[Any, dict[str, Any]] = (
            os.path.abspath(path_or_bytes) if isinstance(path_or_bytes, str | os.PathLike) else None,
            {"max_shapes": max_shapes, "shapes": shapes, **options},
        )
        self._program = open_program(path_or_bytes)
        # its room needs the package onnx, which the line above asks for
        self._array_of: Callable[[Any], Any] = import_module("fmtprop.onnx.model.elements").array_of
        # None is the default, as of compile
        self._options = Options(**{name: value for name, value in options.items() if value is not None})
        self._plans: Plans[_Case, _CasePlan] = Plans(max_shapes)
        self._max_shapes = max_shapes
        #: whether no shape may run without a plan: PyTorch has no fast products of bytes
        self._plans_all = self._options.plans_all or any(map(_has_bytes, self._program.body.constants.values()))
        #: names of the inputs that decide which nodes run, and the values that they had
        self._deciding = deciding_inputs(self._program)
        self._decided: set[_Case] = set()
        #: the first reason for running nodes one by one; None if all of the model was planned for all inputs
        self.reason: str | None = None
        #: whether none of the model is planned
        self._is_left = False
        #: shapes and values for which it cannot be planned, though it is for others
        self._unplanned: set[_Case] = set()
        self._inputs = [node_arg(info) for info in self._program.inputs]
        self._outputs = [node_arg(info) for info in self._program.outputs]
        self._readers = {arg.name: reader_of(arg) for arg in self._inputs}
        self._is_fixed = all(isinstance(size, int) for arg in self._inputs for size in arg.shape)
        #: whether one plan is all that will ever read the weights
        self._is_one = (
            self._is_fixed and all(arg.shape for arg in self._inputs) and not (self._deciding or self._program.weights)
        )
        self._shared = None if self._is_one else Shapes(self._program.body.constants.values())
        narrow = [arg.name for arg in self._inputs if arg.type in ("tensor(float16)", "tensor(bfloat16)")]
        if narrow:
            self._leave(f"input {narrow[0]} is of 16-bit floats, which PyTorch rounds as ONNX does")
        elif self._is_fixed and not self._deciding:
            self._plan(tuple(tuple(int(size or 0) for size in arg.shape) for arg in self._inputs))
            if not (len(self._plans) or self._program.body.constants):  # the plan that failed had them
                self._program = open_program(path_or_bytes)
        if not narrow and not self._options.plans_all:
            self._program.bodies = import_module("fmtprop.onnx.bodies").Bodies(self._program, self._options)
        if shapes is not None:
            self._plan_ahead(shapes)

    def _plan_ahead(self, shapes: Mapping[str, Sequence[int | tuple[int, int, int]]]) -> None:
        if self._deciding:
            names = ", ".join(self._deciding)
            raise InputError(f"shapes: plans depend on values of {names}: leave it out, and run the session on them")
        declared = [(arg.name, arg.shape) for arg in self._inputs]
        for case in cases(shapes, declared, self._max_shapes):
            if not self._is_left:
                self._plan(case)

    def __reduce__(self) -> Any:
        """Be pickled as the path of the model: it is read and planned again where the session is loaded."""
        path, options = self._given
        if path is None:
            raise InputError("a session of a model in memory cannot be pickled: open the session of a file, or there")
        return partial(InferenceSession, **options), (path,)

    def get_inputs(self) -> list[NodeArg]:
        """Return the model's inputs, without those that have an initialiser."""
        return list(self._inputs)

    def get_outputs(self) -> list[NodeArg]:
        """Return the model's outputs."""
        return list(self._outputs)

    def get_modelmeta(self) -> ModelMetadata:
        """Return the file's data about the model."""
        return ModelMetadata(**self._program.metadata)

    def get_providers(self) -> list[str]:
        """Return the execution providers, by ONNX Runtime's names."""
        return ["CPUExecutionProvider"]

    @property
    def plans(self) -> dict[_Case, CompiledModel]:
        """The plans that are kept, by the shapes of all inputs; of inputs that are fixed, with their values."""
        return {case: ready.net for case, ready in self._plans.items()}

    def settle(self, timeout: float | None = None) -> bool:
        """Wait for better plans that are being made in the background; return whether the present ones stay.

        Parameters
        ----------
        timeout : float, optional
            The most seconds to wait for each.
        """
        return all([ready.net.settle(timeout) for ready in self._plans.values()])

    @property
    def reference_nodes(self) -> list[str]:
        """The nodes that ran on ONNX's slow reference, since PyTorch lacks a function for them."""
        return sorted(set(self._program.reference_nodes))

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None
    ) -> list[Any]:
        """Run the model.

        Parameters
        ----------
        output_names : sequence of str, optional
            The requested outputs; all by default.
        input_feed : mapping of str to numpy.ndarray
            All inputs by name; a sequence is a list of arrays.
        run_options : object
            Accepted for ONNX Runtime's programs, and ignored.

        Returns
        -------
        list
            Numpy arrays; lists of them for sequences, None for absent optionals.

        Raises
        ------
        InputError
            A name is unknown or missing, an array is not of the declared type and shape, or a node cannot run on these
            sizes or values.
        """
        array_of = self._array_of
        places = None if output_names is None else self._places(output_names)
        results = self._results(self._values(input_feed))
        return [array_of(result) for result in (results if places is None else [results[place] for place in places])]

    def io_binding(self) -> IOBinding:
        """Return a binding: arrays that runs read and write in place."""
        return IOBinding(self)

    def run_with_iobinding(self, binding: IOBinding, run_options: Any = None) -> None:
        """Run on bound arrays.

        Raises
        ------
        InputError
            As :meth:`run`; or a bound output has another shape or type than the result.
        """
        results = self._results(self._values(binding.inputs), binding)
        binding.results = dict(zip((arg.name for arg in self._outputs), results, strict=True))

    # ------------------------------------------------------------------ running

    def _results(self, values: dict[str, Any], binding: IOBinding | None = None) -> list[Any]:
        before = self.reason, self._is_left
        ready = self._planned(values)
        bound = {} if binding is None else binding.outputs
        if ready is None:
            start = time.thread_time()
            results = self._by_node(self._program.run, values, values, before)
            self._plans.note_run(time.thread_time() - start)
            return [
                written(result, bound.get(arg.name), arg) for result, arg in zip(results, self._outputs, strict=True)
            ]
        fixed = self._fixed(values)
        args = [values[arg.name] for arg in self._inputs if arg.name not in fixed]
        if ready.split is None and bound and len(bound) == len(self._outputs):
            return list(ready.net.run_flat(args, [torch.from_numpy(bound[arg.name]) for arg in self._outputs]))
        results = list(ready.net.run_flat(args))
        if ready.split is not None:
            results = self._by_node(partial(ready.split.finish, self._program), results, values, before)
        elif not bound:
            return results
        return [written(result, bound.get(arg.name), arg) for result, arg in zip(results, self._outputs, strict=True)]

    def _by_node(
        self,
        run: Callable[[Any], list[Any]],
        given: object,
        values: Mapping[str, Any],
        before: tuple[str | None, bool],
    ) -> list[Any]:
        """Run nodes one by one; inputs that no node accepts are no reason to run others so."""
        from fmtprop.onnx.model.program import OperandsError

        try:
            return run(given)
        except OperandsError as error:
            self.reason, self._is_left = before
            shapes = ", ".join(
                f"{name} {list(value.shape)}" for name, value in values.items() if hasattr(value, "shape")
            )
            raise InputError(
                f"{error}; the inputs are {shapes}: pass sizes and values that this node accepts"
            ) from error

    def _planned(self, values: Mapping[str, Any]) -> _CasePlan | None:
        """Return the plan for these inputs; None if the model runs node by node."""
        if self._is_left or len(values) != len(self._inputs):
            return None
        shapes = []
        for arg in self._inputs:
            if not isinstance(value := values[arg.name], torch.Tensor):
                return None
            shapes.append(tuple(value.shape))
        fixed = self._fixed(values)
        case = (*shapes, *_values_of(fixed))
        if case in self._unplanned:
            return None
        if case not in self._plans and not self._plans_all and self._plans.is_rare(case):
            _LOG.info("%s runs node by node for shapes %s, which are rare", self._program.name, shapes)
            return None
        return self._plan(tuple(shapes), fixed)

    def _fixed(self, values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the inputs that decide which nodes run, if they do not have another value in each call."""
        if not self._deciding or any(values[name].numel() != 1 for name in self._deciding):
            return {}
        fixed = {name: values[name] for name in self._deciding}
        if len(self._decided) <= self._max_shapes:
            self._decided.add(_values_of(fixed))
        return fixed if len(self._decided) <= self._max_shapes else {}

    def _leave(self, reason: str) -> None:
        """Run node by node from now on, and say so."""
        self.reason, self._is_left = reason, True
        _LOG.warning("%s runs node by node in PyTorch, without a plan: %s", self._program.name, reason)

    def _names(self) -> list[str]:
        return [arg.name for arg in self._inputs]

    def _note(self, split: Split) -> None:
        """Say once that the last nodes run one by one."""
        if self.reason is None:
            self.reason = str(split.rest.reason)
            count = f"{len(split.rest.steps)} of {len(self._program.body.steps)} nodes"
            _LOG.warning(
                "%s: the last %s run one by one in PyTorch, without a plan: %s", self._program.name, count, self.reason
            )

    def _plan(self, shapes: _Shapes, fixed: Mapping[str, torch.Tensor] | None = None) -> _CasePlan | None:
        fixed = fixed or {}
        case = (*shapes, *_values_of(fixed))
        if (known := self._plans.known(case)) is not None:
            return known
        from fmtprop.onnx.model.graph import head_of
        from fmtprop.onnx.model.program import ContradictionError, LimitError, OperandsError

        def make() -> _CasePlan:
            with on_cpu(), paused():
                graph, split = head_of(self._program, dict(zip(self._names(), shapes, strict=True)), fixed)
                if split is not None:
                    self._note(split)
                options = replace(self._options, confirm=False) if len(self._plans) else self._options
                if self._is_one:
                    self._program.body.constants.clear()
                return _CasePlan(compile_graph(graph, options, owned=self._is_one, shapes=self._shared), split)

        try:
            return self._plans.get(case, make)
        except (ContradictionError, LimitError):
            raise
        except (ImportModelError, ShapeError) as error:
            if self._is_fixed and isinstance(error, OperandsError):
                raise  # no inputs make this node run
            if len(self._plans):  # such as a loop without rounds, or with too many
                if len(self._unplanned) >= _MOST_UNPLANNED:
                    self._unplanned.clear()
                self._unplanned.add(case)
                self.reason = self.reason or str(error)
                text = "%s runs node by node in PyTorch for inputs of shapes %s: %s"
                level = logging.INFO if isinstance(error, OperandsError) else logging.WARNING  # the run will say so
                _LOG.log(level, text, self._program.name, [list(one) for one in shapes], error)
            else:
                self._leave(str(error))
            return None

    # ------------------------------------------------------------------ names and arrays

    def _places(self, names: Sequence[str]) -> list[int]:
        """Return the places of outputs among all; no names are all of them."""
        have = [arg.name for arg in self._outputs]
        if isinstance(names, str):
            raise InputError(f"output_names is {names!r}; it must be a list of names")
        unknown = sorted(set(names or ()) - set(have))
        if unknown:
            raise InputError(f"there is no output {unknown[0]!r}; the model's outputs are {', '.join(have)}")
        return list(map(have.index, names or have))

    def _values(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(feed, Mapping):
            raise InputError(f"input_feed is a {type(feed).__name__}; it must be a dictionary of arrays by name")
        readers = self._readers
        weights = () if feed.keys() == readers.keys() else sorted(set(feed) - set(readers))
        unknown = [name for name in weights if name not in self._program.weights]
        if unknown:
            raise InputError(f"there is no input {unknown[0]!r}; the model's inputs are {', '.join(readers)}")
        missing = [name for name in readers if name not in feed]
        if missing:
            raise InputError(f"input {missing[0]} is missing; the model's inputs are {', '.join(readers)}")
        values = {name: read(feed[name]) for name, read in readers.items()}
        return values if not weights else {**values, **{name: value_of(feed[name], None) for name in weights}}


def _has_bytes(weight: Any) -> bool:
    """Return whether a constant is a matrix of bytes, which a product reads."""
    return isinstance(weight, torch.Tensor) and weight.ndim > 1 and weight.dtype in (torch.int8, torch.uint8)


def _values_of(fixed: Mapping[str, torch.Tensor]) -> _Case:
    return tuple((int(value.item()), tuple(value.shape)) for value in fixed.values())


class IOBinding:
    """Arrays that a session reads and writes in place.

    Parameters
    ----------
    session : InferenceSession
        The session of the model.

    Examples
    --------
    >>> import numpy as np, onnx
    >>> from fmtprop.onnx import InferenceSession
    >>> text = '<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) { y = Relu(x) }'
    >>> session = InferenceSession(onnx.parser.parse_model(text), policy="propagate")
    >>> binding, y = session.io_binding(), np.empty(2, np.float32)
    >>> binding.bind_cpu_input("x", np.float32([-1, 2]))
    >>> binding.bind_output("y", y)
    >>> session.run_with_iobinding(binding)
    >>> y
    array([0., 2.], dtype=float32)
    """

    def __init__(self, session: InferenceSession) -> None:
        self._names = [arg.name for arg in session.get_outputs()]
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, np.ndarray[Any, Any]] = {}
        self.results: dict[str, Any] = {}

    def bind_cpu_input(self, name: str, array: np.ndarray[Any, Any]) -> None:
        """Bind an input to an array; each run reads the array's present content."""
        self.inputs[name] = array

    def clear_binding_inputs(self) -> None:
        """Bind no inputs."""
        self.inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Bind no outputs."""
        self.outputs.clear()

    def bind_output(self, name: str, array: np.ndarray[Any, Any] | str | None = None) -> None:
        """Write an output to an array; without one, or with ``"cpu"``, each run makes its own.

        Raises
        ------
        InputError
            There is no such output, or the array cannot be written to.
        """
        if name not in self._names:
            raise InputError(f"there is no output {name!r}; the model's outputs are {', '.join(self._names)}")
        if array is None or (isinstance(array, str) and array == "cpu"):
            self.outputs.pop(name, None)
            return
        if not isinstance(array, np.ndarray) or not array.flags.writeable:
            raise InputError(f"output {name} cannot be written to {type(array).__name__}: give a writable numpy array")
        if not array.dtype.isnative or min(array.strides, default=0) < 0:
            raise InputError(f"output {name} cannot be written backwards or in another byte order: give a new array")
        self.outputs[name] = array

    def copy_outputs_to_cpu(self) -> list[Any]:
        """Return copies of the last run's outputs."""
        from fmtprop.onnx.model.elements import array_of

        return [np.array(array_of(self.results[name])) for name in self._names if name in self.results]


# ---------------------------------------------------------------- ONNX Runtime's options


def _check_providers(providers: Sequence[Any] | None) -> None:
    if providers is None:
        return
    if isinstance(providers, str):
        raise ImportModelError(f"providers is {providers!r}; it must be a list of names")
    names = [entry[0] if isinstance(entry, tuple) and entry else entry for entry in providers]
    if "CPUExecutionProvider" not in names:
        raise ImportModelError(f"providers are {names}; fmtprop runs on the CPU: CPUExecutionProvider")


def _check_threads(sess_options: Any) -> None:
    if sess_options is not None and not hasattr(sess_options, "intra_op_num_threads"):
        kind = type(sess_options).__name__
        raise UnsupportedOpError(f"sess_options is a {kind}; it must be ONNX Runtime's SessionOptions")
    wanted, have = getattr(sess_options, "intra_op_num_threads", 0), torch.get_num_threads()
    if wanted and wanted != have:
        warnings.warn(
            f"sess_options wants {wanted} threads; a session runs with PyTorch's {have}: call "
            f"torch.set_num_threads({wanted})",
            UserWarning,
            stacklevel=3,
        )
