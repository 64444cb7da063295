"""A callable class for ``Dataset.map_batches``: columns in, columns out.

Owns the way between columns and tensors. Ray itself is not needed to use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fmtprop.errors import InputError
from fmtprop.ray.threads import set_threads
from fmtprop.serving.engine import Source, Spec
from fmtprop.serving.rows import Rows

#: columns of a batch, as Ray gives them with ``batch_format="numpy"``
Batch = Mapping[str, np.ndarray[Any, Any]]


class Predictor:
    """A model for ``Dataset.map_batches``, with its own number of threads in each actor.

    Parameters
    ----------
    plan : str, path, bytes, CompiledModel, or a sequence of these
        A plan file, its bytes, or a compiled model, which Ray carries as the bytes of its plan file; a folder or a list
        of plans for several batch sizes. Actors of one machine that get a path share the memory of the weights.
    outputs : sequence of str, optional
        Columns of the results. Default: the names of the plan's outputs.
    drop : sequence of str
        Columns that are not passed on, such as images that nobody needs any more.
    threads : int, optional
        Threads of this process. Default: the CPUs that Ray assigned to the actor, rounded down, at least one;
        unchanged outside of Ray. They are set before the plan is loaded, which is made again if it is for another
        number.

    Raises
    ------
    PlanError
        The plan cannot be loaded.
    InputError
        The model's inputs or results do not begin with one batch axis, its rows depend on each other, or a parameter
        does not fit.

    Notes
    -----
    Columns that are named as the model's inputs are its arguments, with the batch axis first. The results are added,
    and all columns but those of ``drop`` pass through. A batch may have any number of rows
    (:class:`fmtprop.serving.Rows`).

    Examples
    --------
    >>> import numpy as np, torch, fmtprop as fp
    >>> predict = Predictor(fp.compile(torch.nn.Linear(8, 4), torch.ones(2, 8)), outputs=["y"])
    >>> batch = predict({"input": np.ones((3, 8), np.float32), "id": np.arange(3)})
    >>> batch["y"].shape, batch["id"].tolist()
    ((3, 4), [0, 1, 2])
    """

    def __init__(
        self,
        plan: Source,
        *,
        outputs: Sequence[str] | None = None,
        drop: Sequence[str] = (),
        threads: int | None = None,
    ) -> None:
        set_threads(threads)
        self.rows = Rows(plan)
        if not self.rows.batched:
            sizes = ", ".join(f"{spec.name} {list(spec.dims)}" for spec in (*self.rows.inputs, *self.rows.outputs))
            raise InputError(
                f"model {self.rows.name} has {sizes}: for a data set, each must begin with the same batch axis, and "
                "the results of a row must depend on that row alone; a plan for one row runs each by itself"
            )
        self.drop = frozenset((drop,) if isinstance(drop, str) else drop)
        names = tuple(spec.name for spec in self.rows.outputs)
        self.outputs = names if outputs is None else tuple(outputs)
        if len(self.outputs) != len(names) or len(set(self.outputs)) != len(names):
            raise InputError(f"model {self.rows.name} has {len(names)} results, got outputs={self.outputs}")

    def __call__(self, batch: Batch) -> dict[str, np.ndarray[Any, Any]]:
        """Return the columns of a batch, and those of the model's results.

        Raises
        ------
        InputError
            A column is missing, a row does not fit, or the model refuses its values; the message names the row.
        """
        for name in self.outputs:
            if name in batch and name not in self.drop:
                raise InputError(f"the batch has a column {name!r} already: name the results by outputs=, or drop it")
        columns = [_column(batch, spec) for spec in self.rows.inputs]
        made = [_array(result) for result in self.rows.run(columns)]
        kept = {name: column for name, column in batch.items() if name not in self.drop}
        return {**kept, **dict(zip(self.outputs, made, strict=True))}


def _column(batch: Batch, spec: Spec) -> torch.Tensor:
    """Return a column as the tensor of an input."""
    name = spec.name
    if name not in batch:
        raise InputError(f"the batch has no column {name!r}; it has {', '.join(map(repr, batch)) or 'none'}")
    column, dims = np.asarray(batch[name]), spec.dims[1:]
    if column.dtype == object or len(column.shape) != len(spec.dims) or not _fits(column.shape[1:], dims):
        for row, item in enumerate(column):
            if not _fits(np.shape(item), dims):
                raise InputError(f"row {row} of column {name!r} has shape {np.shape(item)}, the model takes {dims}")
        column = _stacked(column, name) if len(column) else np.zeros((0, *(max(size, 0) for size in dims)), np.uint8)
    if column.dtype == object or column.dtype.kind not in "fiub":
        raise InputError(f"column {name!r} holds {column.dtype}, the model takes {spec.dtype}")
    tensor = torch.from_numpy(np.asarray(_Shared(np.ascontiguousarray(column))))
    if len(column) and tensor.dtype != spec.dtype and not _converts(column, spec.dtype):
        raise InputError(f"column {name!r} holds {column.dtype}, the model takes {spec.dtype}: convert it before")
    return tensor.to(spec.dtype)


class _Shared:
    """An array without a copy: PyTorch warns of memory that must not be written, as Ray's; no plan writes there."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        interface = array.__array_interface__
        self.array = array
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _fits(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    return len(shape) == len(dims) and all(wanted in (-1, size) for size, wanted in zip(shape, dims, strict=True))


def _stacked(column: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    first = np.shape(column[0])
    for row, item in enumerate(column):
        if np.shape(item) != first:
            raise InputError(f"row {row} of column {name!r} has shape {np.shape(item)}, row 0 has {first}")
    return np.stack([np.asarray(item) for item in column])


def _converts(column: np.ndarray[Any, Any], dtype: torch.dtype) -> bool:
    """Whether a column may be converted without a change of what its numbers mean: integers must fit."""
    is_float = column.dtype.kind == "f"
    if is_float or dtype.is_floating_point or dtype == torch.bool:
        return is_float == dtype.is_floating_point and (column.dtype.kind == "b" or dtype != torch.bool)
    limits = torch.iinfo(dtype)
    return not column.size or bool(limits.min <= int(column.min()) and int(column.max()) <= limits.max)


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a result as an array; numpy has no bf16, so that becomes f32, exactly."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
