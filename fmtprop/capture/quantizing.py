"""``fp.quantize``: torchao quantizes a module, with the quantizer that it has for x86 CPUs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from fmtprop.errors import ImportModelError, InputError
from fmtprop.system.printable import first_line


def quantize(
    module: torch.nn.Module,
    calibration_data: Iterable[Any],
    *,
    quantizer: Any = None,
    dynamic_shapes: Any = None,
) -> torch.fx.GraphModule:
    """Quantize a module to int8: activations u8 with a scale for each tensor, weights s8 with one for each output.

    This is PyTorch's own way, torchao's PT2E: the module is exported, its layers are observed on the calibration
    data, and the scales are fixed. The result computes in PyTorch, too.

    Parameters
    ----------
    module : torch.nn.Module
        In evaluation mode; it stays as it is.
    calibration_data : iterable of torch.Tensor or tuple of torch.Tensor
        Some dozens of typical inputs, each what one call of the module takes. The first one fixes the shapes.
    quantizer : torchao.quantization.pt2e.Quantizer, optional
        Which layers are quantized, and how. Default: ``X86InductorQuantizer`` with its default configuration.
    dynamic_shapes : optional
        Axes of the inputs with more than one size, as :func:`torch.export.export` takes them.

    Returns
    -------
    torch.fx.GraphModule
        A module for :func:`fmtprop.compile` and ``torch.compile(module, backend="fmtprop")``.

    Raises
    ------
    InputError
        It is no module or in training mode, or there are no data, or they have NaN or infinities,
        or the module cannot be exported or run on them.
    ImportModelError
        torchao is not installed.

    Examples
    --------
    >>> import fmtprop as fp
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
    >>> quantized = fp.quantize(model, [torch.randn(1, 3, 16, 16) for _ in range(4)])
    >>> fp.compile(quantized, torch.randn(1, 3, 16, 16))(torch.randn(1, 3, 16, 16)).shape
    torch.Size([1, 8, 14, 14])

    References
    ----------
    torchao documentation, "PyTorch 2 Export Quantization with X86 Backend through Inductor".
    """
    if not isinstance(module, torch.nn.Module):
        raise InputError(f"quantize takes a torch.nn.Module, got {type(module).__name__}")
    if module.training:
        raise InputError(
            "quantize needs the module as it is used, but it is in training mode: call module.eval() first"
        )
    if isinstance(calibration_data, torch.Tensor):
        raise InputError("calibration_data is one tensor: pass a list of inputs, each what one call takes")
    data = [(one,) if isinstance(one, torch.Tensor) else tuple(one) for one in calibration_data]
    _check(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own
            from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
            from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86
    except ImportError as error:
        raise ImportModelError("quantize needs torchao: pip install 'fmtprop[quantize]'") from error
    if quantizer is None:
        quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        done = 0
        try:  # the module's own code runs: it raises anything
            try:  # without TorchDynamo, calls of one module are one layer for the quantizer, which may refuse it
                exported = torch.export.export(module, data[0], dynamic_shapes=dynamic_shapes, strict=True)
                observed = prepare_pt2e(exported.module(), quantizer)
            except Exception:
                exported = torch.export.export(module, data[0], dynamic_shapes=dynamic_shapes)
                observed = prepare_pt2e(exported.module(), quantizer)
            for one in data:
                observed(*one)
                done += 1
        except Exception as error:
            raise InputError(
                f"{type(module).__name__} cannot run item {done} of calibration_data, which must be the arguments of "
                f"one call, in the shapes of item 0 or of dynamic_shapes: {type(error).__name__}: {first_line(error)}"
            ) from error
        converted: torch.fx.GraphModule = convert_pt2e(observed)
    return converted


def _check(data: list[tuple[Any, ...]]) -> None:
    """Refuse data from which no scales follow."""
    if not data:
        raise InputError("calibration_data is empty: scales need some typical inputs")
    for index, one in enumerate(data):
        for tensor in one:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not tensor.isfinite().all():
                raise InputError(f"item {index} of calibration_data has NaN or infinities: scales would be none")
