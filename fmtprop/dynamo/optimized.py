"""``fp.optimize``: a module whose own forward pass is compiled by the backend."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from fmtprop.dynamo.backend import backend, options_of
from fmtprop.dynamo.coded_layers import keep_codes
from fmtprop.errors import InputError, UnsupportedOpError

Model = TypeVar("Model", bound=torch.nn.Module)

#: attribute of a module whose forward pass was replaced: the options, for the message of a second call
_DONE = "_fmtprop_options"


def optimize(
    model: Model, dtype: str = "f32", weights: str | None = None, embeddings: str | None = None, **options: Any
) -> Model:
    """Let the backend compile a model's forward pass, and return the model itself.

    Whatever calls the model, such as ``generate`` and pipelines of transformers or ``encode`` of sentence-transformers,
    works as before. The first call of each kind of input compiles.

    Without `weights` and `embeddings`, parameters stay as they are. With them, the model's linear layers or embeddings
    keep codes in place of their floating weights, which are freed one after another, so that memory never holds the
    model twice. Then the model is for inference alone (no parameter requires a gradient), and ``layer.weight`` is
    computed from the codes.

    Parameters
    ----------
    model : torch.nn.Module
        In evaluation mode, on the CPU.
    dtype : {"f32", "bf16"}
        Data type of compute-intensive ops, as of :func:`fmtprop.compile`.
    weights : {None, "int8", "int4"}
        Whether the weights of large products become codes, as of :func:`fmtprop.compile`.
    embeddings : {None, "int8", "int4"}
        Whether the tables of embeddings become codes, as of :func:`fmtprop.compile`: one table for an embedding and the
        head that shares it.
    **options : object
        Other options of :func:`fmtprop.compile`, such as ``tune``.

    Returns
    -------
    torch.nn.Module
        `model`. ``del model.forward`` undoes the compilation; codes stay.

    Raises
    ------
    InputError
        It is no module, is in training mode, or was optimized before.
    UnsupportedOpError
        An option is unknown, or a value is not one of its values.

    Examples
    --------
    >>> import torch, fmtprop as fp
    >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()).eval()
    >>> fp.optimize(model, weights="int8") is model
    True
    >>> with torch.no_grad():
    ...     model(torch.ones(1, 256)).shape
    torch.Size([1, 256])
    """
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"optimize takes a torch.nn.Module, got {type(model).__name__}")
    if model.training:
        raise InputError("optimize is for inference, but the model is in training mode: call model.eval() first")
    if "forward" in vars(model):
        done = getattr(model.forward, _DONE, None)
        why = f"was optimized before, with {done}" if done is not None else "has a forward pass of its own"
        raise InputError(f"this {type(model).__name__} {why}: del model.forward undoes that")
    given = {**options, "dtype": dtype, "weights": weights, "embeddings": embeddings}
    options_of(None, given)  # errors come now, not at the first call
    if options.get("training"):
        raise UnsupportedOpError("optimize is for inference: use fp.compile(model, x, training=True)")
    if weights is not None or embeddings is not None:
        keep_codes(model, weights, embeddings)
    compiled = torch.compile(model.forward, backend=backend, options=given)
    setattr(compiled, _DONE, given)
    model.forward = compiled
    return model
