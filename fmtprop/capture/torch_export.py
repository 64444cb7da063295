"""Import of a PyTorch module as a graph, through ``torch.export``: once, or for several sizes.

:mod:`fmtprop.capture.exporting` exports, :mod:`fmtprop.capture.functionalising` removes changes in place, and
:mod:`fmtprop.capture.program_import` imports. Must not know formats, targets or plans.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument

from fmtprop.capture.example_of_one import with_small
from fmtprop.capture.examples import check_examples
from fmtprop.capture.exporting import check_tensors, export, exporting, positional
from fmtprop.capture.functionalising import functionalised
from fmtprop.capture.methods import as_module
from fmtprop.capture.program_import import import_program, user_inputs
from fmtprop.capture.specialise import Sizes, reads_constants, specialised
from fmtprop.errors import ImportModelError, InputError
from fmtprop.ir.graph import Graph
from fmtprop.ir.structure import nested_alike
from fmtprop.ir.verify import Stage, verify
from fmtprop.ops.pytorch import tree_leaves


def from_torch(
    module: nn.Module | ExportedProgram,
    example_inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Graph:
    """Import a PyTorch model as an op graph.

    The model is exported for inference with the shapes of the example inputs; its composite ops (convolution, linear,
    normalization, attention) stay whole. A call without an op of fmtprop becomes an ``aten`` node, which runs on the
    reference target, so every exportable model with static shapes can be imported. Derivatives that its forward pass
    computes (``torch.func``, ``torch.autograd.grad``) are calls like all others, which torch.export cannot trace.

    Parameters
    ----------
    module : torch.nn.Module, method of a module, or torch.export.ExportedProgram
        The model, on the CPU. A module is exported in eval mode; its own mode does not change.
    example_inputs : tensor or tuple, optional
        Positional arguments of ``forward``: they give shapes and data types, and arguments that are not tensors
        are fixed in the graph. Not needed for an exported program.
    kwargs : mapping of str to object, optional
        Keyword arguments of ``forward``.
    name : str, optional
        Name of the graph; the class of the module by default.

    Returns
    -------
    Graph
        Inputs are named as ``forward`` names its arguments, constants by their qualified name in the module, nodes
        carry the module they come from as ``origin``. Constants share memory with the module where it is contiguous.
        ``graph.structure`` tells how results are nested: :func:`fmtprop.ir.structure.restructure`.

    Raises
    ------
    ImportModelError
        The model cannot be exported, has dynamic shapes, control flow that depends on data, state that it changes,
        random numbers, or tensors that are not plain CPU tensors.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    >>> graph = from_torch(net, torch.zeros(2, 8), name="net")
    >>> [node.name for node in graph.input_nodes], sorted(graph.constants)
    (['input'], ['0.bias', '0.weight'])
    """
    with exporting():
        model = _exported(as_module(module), example_inputs, kwargs, None, name)
        graph = model.imported(model.program)
        verify(graph, Stage.IMPORTED)
    if isinstance(module, ExportedProgram):
        check_examples(graph, example_inputs, kwargs)
    return graph


def from_torch_symbolic(
    module: nn.Module | ExportedProgram,
    example_inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Exported:
    """Export a PyTorch model once, for sizes that may change.

    `dynamic_shapes`: which axes may change, as ``torch.export.export`` takes it. An exported program has it already.
    Raises ImportModelError as :func:`from_torch`; or a size that is marked cannot change.
    """
    with exporting():
        return _exported(module, example_inputs, kwargs, dynamic_shapes)


@dataclass(frozen=True)
class Exported:
    """A functional exported program, and its import as graphs."""

    program: ExportedProgram
    name: str
    #: signature of the module's ``forward``, if there is a module
    signature: inspect.Signature | None
    #: the example tensors of the export, without data
    examples: Sequence[torch.Tensor]
    #: PyTorch's check of the sizes for which a given program took its branches
    guards: Callable[..., object] | None = None
    #: the nesting of arguments and results of a program that has them flat
    structure: str = ""
    #: from input, axis and size where a size is 0 or 1 to the program for these. PyTorch exports for sizes from 2 on:
    #: it takes 0 and 1 as numbers in many of its rules, and a branch on them as decided. A given program has none.
    of_small: Callable[[tuple[tuple[int, int, int], ...]], Exported] | None = None

    def graph(self, given: Sequence[torch.Tensor]) -> Graph:
        """Import the program for the sizes of some inputs.

        Result: its constants share memory with the program, so graphs of all sizes share them. Raises InputError if the
        model was not exported for these sizes.
        """
        program = self.of(given)
        with exporting():
            return self.imported(specialised(program.program, given))

    def of(self, given: Sequence[torch.Tensor]) -> Exported:
        """Return the program for the sizes of some inputs; InputError if the model was not exported for them."""
        small = self.of_small is not None and self._sizes.small(given)
        self._sizes.check(given, branches=not small)
        if self.of_small is not None and small:
            return self.of_small(small).of(given)
        self._check_branches(given)
        return self

    @cached_property
    def gives_tensors(self) -> bool:
        """Whether all results are tensors or the same in each call, so that :meth:`run` can compute them."""
        recorded = {node.name: node.meta.get("val") for node in self.program.graph.nodes}
        for spec in self.program.graph_signature.output_specs:
            value = recorded.get(spec.arg.name) if isinstance(spec.arg, TensorArgument) else None
            is_known = isinstance(value, torch.Tensor) or isinstance(spec.arg, ConstantArgument)
            if not is_known or spec.kind is not OutputKind.USER_OUTPUT:
                return False
        return True

    def run(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the program by PyTorch's operators; results share no memory with others, inputs or weights.

        Only where results are tensors, and :meth:`of` has returned it for these sizes.
        """
        program, tensors = self.program, iter(given)
        state = {**program.constants, **program.state_dict}
        operands = [
            state[str(spec.target)]
            if spec.kind is not InputKind.USER_INPUT
            else next(tensors)
            if isinstance(spec.arg, TensorArgument)
            else spec.arg.value
            for spec in program.graph_signature.input_specs
        ]
        with torch.no_grad():
            results = fx.Interpreter(program.graph_module).run(*operands, enable_io_processing=False)
        taken = {operand.untyped_storage().data_ptr() for operand in operands if isinstance(operand, torch.Tensor)}
        owned = []
        for result in results:
            if isinstance(result, torch.Tensor):
                place = result.untyped_storage().data_ptr()
                owned.append(result.clone() if place in taken else result.detach())
                taken.add(place)
        return owned

    @cached_property
    def _sizes(self) -> Sizes:
        return Sizes(self.program)

    def _check_branches(self, given: Sequence[torch.Tensor]) -> None:
        if self.guards is None:
            return
        arguments, tensors = [spec.arg for spec in user_inputs(self.program)], iter(given)
        leaves = [next(tensors) if isinstance(a, TensorArgument) else getattr(a, "value", None) for a in arguments]
        try:
            self.guards(*leaves)
        except AssertionError as error:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in given)
            raise InputError(
                f"{self.name} takes another branch for {shapes} than when it was exported ({error}); export it with "
                "example inputs of such a size, too"
            ) from error

    def imported(self, program: ExportedProgram) -> Graph:
        """Import this program, or its specialised form."""
        graph = import_program(program, self.name, self.signature)
        if self.structure:
            graph.structure = nested_alike(self.structure, graph.structure)
        if not graph.output_nodes:
            raise ImportModelError(
                f"{graph.name} returns no tensor (but None, a number or nothing), so there is nothing to compile; "
                "return its results"
            )
        return graph


def _exported(
    module: nn.Module | ExportedProgram,
    example_inputs: Any,
    kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
    name: str | None = None,
) -> Exported:
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ImportModelError(
            f"kwargs must be a dict of example keyword inputs by name, got a {type(kwargs).__name__}"
        )
    guards, of_small = None, None
    if isinstance(module, ExportedProgram):
        program = module
        check_tensors({**program.state_dict, **program.constants})
        guards = _guards_of(program)
    elif isinstance(module, torch.jit.ScriptModule):
        raise ImportModelError(
            f"{module.original_name} is a TorchScript module, which torch.export does not take; import the nn.Module "
            "that it was made from"
        )
    elif isinstance(module, nn.Module):
        program = export(module, example_inputs, dict(kwargs or {}), dynamic_shapes)
        if dynamic_shapes is not None:
            of_small = cache(partial(_of_small, module, example_inputs, dict(kwargs or {}), dynamic_shapes))
    else:
        raise ImportModelError(
            f"from_torch takes a torch.nn.Module or a torch.export.ExportedProgram, got {type(module).__name__}; "
            "wrap a function in a module"
        )
    program = functionalised(program)  # a loaded program loses its guards here
    signature = None if isinstance(module, ExportedProgram) else inspect.signature(module.forward)
    without = example_inputs is None and not kwargs
    leaves = Sizes(program).hints if without else tree_leaves((example_inputs, kwargs))
    examples = [leaf.to("meta") for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if Sizes(program).are_fixed and reads_constants(program):
        program = specialised(program, examples)
    return Exported(program, name or _name_of(program, module), signature, examples, guards, of_small=of_small)


def _of_small(
    module: nn.Module,
    example_inputs: Any,
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    small: tuple[tuple[int, int, int], ...],
) -> Exported:
    args, kwargs, left = with_small(module, positional(module, example_inputs, kwargs), kwargs, dynamic_shapes, small)
    with exporting():
        return _exported(module, args, kwargs, left)


def _guards_of(program: ExportedProgram) -> Callable[..., object] | None:
    if not getattr(program, "_guards_code", None):
        return None
    found: Callable[..., object] | None = getattr(program.module(), "_guards_fn", None)
    return found


def _name_of(program: ExportedProgram, module: nn.Module | ExportedProgram) -> str:
    if isinstance(module, nn.Module):
        return type(module).__name__
    for node in program.graph.nodes:
        for _, owner in (node.meta.get("nn_module_stack") or {}).values():
            return str(owner if isinstance(owner, str) else owner.__name__).rpartition(".")[2]
    return "model"
