"""From a captured graph to a training step: the compilers for AOTAutograd.

AOTAutograd traces forward and backward as one graph, and takes mutation of buffers out of it. It is also the autograd
function that runs both halves: it saves tensors for the backward half, and raises PyTorch's usual errors if a saved
tensor was changed or a graph is walked twice. Owns the list of saved tensors; :mod:`fmtprop.training.step` runs the
halves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx

from fmtprop.capture.fx_import import copied, placeholders
from fmtprop.capture.in_place import with_copies, with_windows
from fmtprop.capture.pytorch import with_rule
from fmtprop.compiling.options import Options
from fmtprop.compiling.turns import Compare
from fmtprop.errors import ImportModelError
from fmtprop.ops.pytorch import prelu_kernel_backward
from fmtprop.training.attention import attention_in_parts, heads_in_parts
from fmtprop.training.effects import join_checks, keep_factorized_side, without_tokens
from fmtprop.training.embedding_bag import whole_embedding_bag
from fmtprop.training.encoder_layers import encoder_layer_in_parts, native_heads_in_parts
from fmtprop.training.one_hot import whole_one_hot
from fmtprop.training.pytorch import (
    TracingContext,
    ViewAndMutationMeta,
    aot_autograd,
    default_partition,
    enable_mkldnn,
    is_mkldnn_enabled,
    min_cut_rematerialization_partition,
    rule_of_recurrent_layers,
    set_rule_of_recurrent_layers,
    size_of_image,
    suggest_memory_format,
)
from fmtprop.training.recurrent import RECURRENT, whole_recurrent
from fmtprop.training.rival import Rival
from fmtprop.training.step import TrainingStep, leading_sizes
from fmtprop.training.unread_rows import leave_out_unread_rows

_LOG = logging.getLogger(__name__)

#: errors of PyTorch about gradients that eager PyTorch raises only in a backward pass, and about assignments to `data`
_NO_GRADIENTS = ("derivative for ", "modified by an inplace operation", "Encountered a set_ on a graph input")

#: a backend of torch.compile, or a compiler of AOTAutograd's
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

#: `memory` option -> PyTorch's function that splits a step into its halves, the second one by a minimal cut
_PARTITIONS: Mapping[str, Callable[..., tuple[fx.GraphModule, fx.GraphModule]]] = {
    "save": default_partition,
    "recompute": min_cut_rematerialization_partition,
}


def training_backend(
    make_step: Callable[[fx.GraphModule, fx.GraphModule, int], TrainingStep],
    inference: Compiler,
    options: Options,
    *,
    compare: Compare | None = None,
    required: bool = True,
    writes: bool = False,
) -> Compiler:
    """Return a backend of ``torch.compile`` for graphs with and without gradients.

    `options`: of the plans: their precision, and whether the backward half recomputes cheap results (``memory``).
    `writes`: whether functional graphs for `inference` write changed inputs themselves, by ``copy_`` at their end.
    """
    parted = _PARTITIONS[options.memory]

    def compile_captured(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        made: list[TrainingStep] = []

        def partition(joint: fx.GraphModule, inputs: Any, **how: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
            tokens = join_checks(joint)
            keep_factorized_side(joint)
            forward, backward = parted(joint, inputs, **how)
            program, outputs = _copy(forward), how["num_fwd_outputs"]
            without_tokens(program, tokens)
            made.append(make_step(program, _copy(backward), outputs - tokens))
            made[-1].tokens = tokens
            _add_ticket(forward, backward, how["num_fwd_outputs"])
            return forward, backward

        def begin(*_: Any) -> Callable[[list[Any]], Any]:
            if (metadata := metadata_now()) is not None:
                changed, inputs = metadata.mutated_inp_runtime_indices, metadata.input_info
                made[-1].changed = frozenset(changed)
                made[-1].written = tuple((i, n) for n, i in enumerate(changed) if _is_plain_write(inputs[i]))
                _without_zeros(made[-1].programs[1], [inputs[i] for i in changed if inputs[i].requires_grad])
            return _boxed(made[-1].forward)

        def infer(program: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            tokens = join_checks(program)
            without_tokens(program, tokens)
            run = inference(program, inputs[tokens:])
            return _boxed(lambda args: [*args[:tokens], *run(args[tokens:])]) if tokens else run

        traced = aot_autograd(
            fw_compiler=begin,
            bw_compiler=lambda *_: _boxed(made[-1].backward),
            inference_compiler=infer,
            partition_fn=partition,
            decompositions=_DECOMPOSITIONS,
            # while gradients are recorded, AOTAutograd must see changes of inputs
            keep_inference_input_mutations=writes and not torch.is_grad_enabled(),
        )
        captured = fx.GraphModule(module, copied(module.graph))  # the capture of gradients changes calls
        leave_out_unread_rows(module.graph)
        _replace_calls(module, options.dtype)
        try:
            changed = with_windows(module)
        except ImportModelError:
            if required:
                raise
            return captured
        try:
            with _step_by_step(module), _as_pytorch_computes():
                run = _traced(traced, changed, example_inputs)
        except (RuntimeError, AssertionError) as error:
            if not any(text in str(error) for text in _NO_GRADIENTS):
                raise
            if required:
                raise ImportModelError(
                    f"PyTorch cannot trace the gradients: {str(error).partition(chr(10))[0]}. Call what has none under "
                    "torch.no_grad(), or leave it out of the module that is compiled"
                ) from error
            # PyTorch has no gradients of this graph: a caller may never ask for them, and gets its error otherwise
            _LOG.info("a graph runs in PyTorch: %s", error)
            return captured
        run = _with_numbers(run, module, example_inputs)
        if not made or (required and compare is None):
            return run
        return Rival(run, captured, made[-1], compare, required=required)

    return compile_captured


def _traced(trace: Compiler, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Trace a captured graph; with copies in place of its in-place calls where PyTorch cannot trace these.

    It cannot follow their strides through views, or finds that one changed a tensor that its own gradient reads.
    """
    try:
        return trace(module, example_inputs)
    except (RuntimeError, ValueError) as error:
        if (changed := with_copies(module, error)) is None:
            raise
        return trace(changed, example_inputs)


def _with_numbers(run: Callable[..., Any], module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """Return a function that takes the numbers of Python's ``random``: PyTorch declares f32 for them, and gives f64."""
    inputs = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    drawn = {i: examples[i].dtype for i, name in enumerate(inputs) if name.startswith("random_value_")}
    if not drawn:
        return run
    return lambda *args: run(*(arg.to(drawn[i]) if i in drawn else arg for i, arg in enumerate(args)))


def _in_format_of_source(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function whose results have the memory format of the source: PyTorch's declaration says row-major."""

    def call(input: torch.Tensor, groups: int) -> torch.Tensor:
        form: torch.memory_format = suggest_memory_format(input)
        return function(input, groups).contiguous(memory_format=form)

    return call


def _itself_if_off(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return dropout whose result is its source where it drops nothing, as in eager: PyTorch traces a copy.

    A model may then change the source in place.
    """

    def call(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        dropped = function(input, *args, **kwargs)  # which checks the arguments
        trains = kwargs.get("training", kwargs.get("train", args[1] if len(args) > 1 else True))
        return dropped if trains and kwargs.get("p", args[0] if args else 0.5) != 0 else input

    return call


#: PyTorch's function -> the function that takes it, and returns it as one call, or as this project traces it
_WHOLE = {
    **dict.fromkeys(RECURRENT, whole_recurrent),
    "dropout": _itself_if_off,
    "embedding_bag": whole_embedding_bag,
    "one_hot": whole_one_hot,
    "channel_shuffle": _in_format_of_source,
}


def _replace_calls(module: fx.GraphModule, dtype: str) -> None:
    """Replace calls of a captured graph that PyTorch would trace step by step, and layers of transformers by parts.

    Graphs within, of checkpoints for instance, are replaced by copies, since other graphs may have them, too.
    """
    for name, part in module.named_children():
        if isinstance(part, fx.GraphModule):
            own = fx.GraphModule(part, copied(part.graph))
            _replace_calls(own, dtype)
            setattr(module, name, own)
    made: dict[str, Callable[..., Any]] = {
        **_WHOLE,
        "scaled_dot_product_attention": partial(attention_in_parts, lowered=dtype == "bf16"),
        "multi_head_attention_forward": partial(heads_in_parts, lowered=dtype == "bf16"),
        "_transformer_encoder_layer_fwd": encoder_layer_in_parts,
        "_native_multi_head_attention": native_heads_in_parts,
    }
    for node in module.graph.nodes:
        make = made.get(getattr(node.target, "__name__", ""))
        if node.op == "call_function" and make is not None and not node.meta.get("is_whole"):
            node.target = make(node.target)
            node.meta["is_whole"] = True
    module.recompile()


@contextmanager
def _step_by_step(module: fx.GraphModule) -> Iterator[None]:
    """Make PyTorch trace an LSTM as products and functions, and any recurrent layer with its dropout.

    The workspace of PyTorch's own call (``mkldnn_rnn_layer``) has another size than its declaration, so a graph cannot
    express it.
    """
    enabled, traced = is_mkldnn_enabled(), rule_of_recurrent_layers()
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    recurrent = any(getattr(node.target, "__name__", "") == "lstm" for graph in graphs for node in graph.nodes)
    # not torch.backends.mkldnn.flags: it sets more, and warns
    enable_mkldnn(enabled and not recurrent)
    set_rule_of_recurrent_layers(partial(_recurrent_layers, traced))
    try:
        yield
    finally:
        enable_mkldnn(enabled)
        set_rule_of_recurrent_layers(traced)


def _recurrent_layers(
    traced: Callable[..., Any],
    src: torch.Tensor,
    states: Sequence[Any],
    parameters: Sequence[Any],
    has_biases: bool,
    count: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *how: Any,
) -> tuple[torch.Tensor, list[Any]]:
    """Trace recurrent layers one by one: of several, PyTorch's rule forgets the dropout between them."""
    size = 2 if bidirectional else 1
    dst, final = src.transpose(0, 1) if batch_first else src, []
    for layer in range(count):
        own = slice(layer * size, (layer + 1) * size)
        if layer:
            dst = torch.dropout(dst, dropout, train)
        dst, found = traced(
            dst, states[own], parameters[own], has_biases, 1, 0.0, train, bidirectional, False, *how
        )  # fmt: skip
        final += found
    return dst.transpose(0, 1) if batch_first else dst, final


def _group_norm(src: Any, scale: Any, shift: Any, *sizes: Any) -> Any:
    """Normalize bf16 with f32 scales in f32: PyTorch declares other types of the statistics than its kernel gives."""
    if scale is None or scale.dtype == src.dtype:
        return NotImplemented
    dst, mean, inverse = torch.ops.aten.native_group_norm(src.to(scale.dtype), scale, shift, *sizes)
    return dst.to(src.dtype), mean, inverse


def _group_norm_backward(diff: Any, src: Any, mean: Any, inverse: Any, scale: Any, *how: Any) -> Any:
    if scale is None or scale.dtype == src.dtype:
        return NotImplemented
    wide = [tensor.to(scale.dtype) for tensor in (diff, src, mean, inverse)]
    diff_src, *affine = torch.ops.aten.native_group_norm_backward(*wide, scale, *how)
    return diff_src if diff_src is None else diff_src.to(src.dtype), *affine


@torch.library.custom_op("fmtprop::prelu_backward", mutates_args=())
def _prelu_backward(
    diff_dst: torch.Tensor, src: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of source and slopes; PyTorch's call gives a gradient of the slopes for each element."""
    diff_src, diff_weights = prelu_kernel_backward(diff_dst, src, weights)
    return diff_src, diff_weights.sum_to_size(weights.shape)


@_prelu_backward.register_fake
def _(diff_dst: torch.Tensor, src: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(src), torch.empty_like(weights)


_DECOMPOSITIONS = {
    prelu_kernel_backward.default: _prelu_backward,
    torch.ops.aten.native_group_norm.default: _group_norm,
    torch.ops.aten.native_group_norm_backward.default: _group_norm_backward,
}

#: PyTorch's resamplings of images, for which it has kernels
_RESAMPLINGS = (
    *(f"{name}{axes}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for axes in (1, 2, 3)),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
)


@contextmanager
def _as_pytorch_computes() -> Iterator[None]:
    """Make PyTorch trace a resampling as one call, with one call for its gradient, and a dropout as it computes it.

    Its rules for Python would trace gathers and scatters of single numbers, which take seven times as long.
    """
    with ExitStack() as restored:
        for name in _RESAMPLINGS:
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                rule = partial(partial, _with_sizes, packet.default) if overload == "vec" else None
                restored.callback(with_rule(getattr(packet, overload), rule))
        restored.callback(with_rule(torch.ops.aten.dropout.default, partial(partial, _dropout)))
        yield


def _dropout(in_parts: Callable[..., Any], src: Any, p: float, train: bool) -> Any:
    """Return a source that keeps all numbers itself, not a copy; of one that keeps none, draw none."""
    if not train or p == 0:
        return src
    return src * 0.0 if p == 1 else in_parts(src, p, train)


def _with_sizes(resample: Any, in_parts: Callable[..., Any], src: Any, sizes: Any, *how: Any) -> Any:
    """Resample by sizes or factors, the form of PyTorch's functions.

    PyTorch has no gradients of some resamplings for sizes that change, and its rule for one call refuses no images:
    these are traced as parts.
    """
    *options, factors = how
    changes = any(isinstance(size, torch.SymInt) for size in (*src.shape, *(sizes or ())))
    is_empty = any(size == 0 for size in src.shape if isinstance(size, int))
    if is_empty or (changes and src.requires_grad):
        return in_parts(src, sizes, *how)
    found: Any = size_of_image(src.size(), sizes, factors)
    return resample(src, found, *options, *(factors or [None] * len(found)))


def _is_plain_write(info: Any) -> bool:
    """Return whether a captured graph only writes new numbers to an argument, and no gradients pass there."""
    return info.mutates_data and not (info.mutates_metadata or info.mutates_storage_metadata or info.requires_grad)


def _without_zeros(backward: fx.GraphModule, changed: Sequence[Any]) -> None:
    """Give arguments that are overwritten under ``no_grad`` no gradient: AOTAutograd's is that of their new numbers.

    Nothing is differentiated by these, so it would be 0, where eager PyTorch has none.
    """
    tangents = [node for node in placeholders(backward) if node.name.startswith("tangents_")]
    zeros = {
        node for node, info in zip(tangents, changed, strict=False) if info.mutations_under_no_grad_or_inference_mode
    }
    (output,) = backward.graph.find_nodes(op="output")
    output.args = ([None if result in zeros else result for result in output.args[0]],)
    backward.recompile()


def metadata_now() -> ViewAndMutationMeta | None:
    """Return what AOTAutograd knows of the graph in the making."""
    context = TracingContext.try_get()
    return context.fw_metadata if context is not None else None


def _boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return a function that takes its arguments as one list, the form of AOTAutograd's calls."""

    def boxed(args: list[Any]) -> Any:
        return run(args)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy that can also run in PyTorch: the strides of real tensors are not always the traced ones."""
    graph = copied(module.graph)
    for node in graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    return fx.GraphModule(module, graph)


def _add_ticket(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> None:
    """Make the first saved tensor, and the backward half's first argument, the ticket of the forward run.

    Other saved tensors are the caller's own, or stay in the plan's memory: AOTAutograd must not take them for memory
    that the backward half may overwrite, so it is not told their types.
    """
    output = next(node for node in forward.graph.nodes if node.op == "output")
    results = list(output.args[0])
    like = next(node.meta["val"] for node in backward.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor))
    with forward.graph.inserting_before(output):
        ticket = forward.graph.call_function(torch.ops.aten.empty.memory_format, ([],), {"dtype": torch.int64})
    with like.fake_mode:
        value = torch.empty([], dtype=torch.int64)
    for node in results[outputs:]:
        if node.op != "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
            node.meta.pop("val")
    output.args = ([*results[:outputs], ticket, *results[outputs:]],)
    first = list(backward.graph.nodes)[leading_sizes(backward)]
    with backward.graph.inserting_before(first):
        backward.graph.placeholder("ticket").meta["val"] = value
    forward.recompile()
    backward.recompile()
