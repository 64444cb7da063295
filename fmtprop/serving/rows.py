"""A model over any number of rows: which plan runs which of them.

Owns the rule that rows are independent, which it tries out; knows neither requests nor columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fmtprop.errors import FmtpropError, InputError
from fmtprop.serving.engine import Engine, Source, Spec, engines_of

#: largest difference of a row's results, relative to its largest, when other rows change: rows are then independent.
#: The same kernels compute the row both times, so most models have 0; scales that a batch shares make 1e-2.
_SAME = 1e-4

#: sizes of a call's inputs without their rows: what plans must have been made for
Shapes = tuple[tuple[int, ...], ...]


class Rows:
    """A model that takes any number of rows, by plans for some.

    Parameters
    ----------
    source : str, path, bytes, CompiledModel, or a sequence of these
        The plans of one model: a plan file, a folder of them, compiled models; one for each batch size and each other
        size that calls have.
    name : str, optional
        Name of the model, for messages; the plan's own by default.

    Attributes
    ----------
    inputs, outputs : tuple of Spec
        Inputs and results; -1 is a size that calls choose.
    batched : bool
        Whether the first axis of each input and result is the batch, and each row's results depend on that row alone.
        This is tried out on random rows, three runs of each plan. Otherwise a call must have the sizes of a plan.

    Raises
    ------
    InputError
        There is no plan, or the plans are not of one model: their inputs or results differ in name or type.
    PlanError
        A plan cannot be loaded.

    Notes
    -----
    Rows run by those plans that take the least time together, by the costs that they were chosen with; rows that are
    missing in the last run are zeros, whose results are dropped.

    Examples
    --------
    >>> import torch, fmtprop as fp
    >>> from fmtprop.serving import Rows
    >>> model = torch.nn.Linear(8, 4)
    >>> rows = Rows([fp.compile(model, torch.ones(n, 8)) for n in (1, 4)])
    >>> rows.inputs[0].dims, [len(y) for y in rows.run([torch.ones(6, 8)])]
    ((-1, 8), [6])
    """

    def __init__(self, source: Source, name: str | None = None) -> None:
        engines = engines_of(source)
        if not engines:
            raise InputError(f"model {name or ''} has no plan: give a plan file, or a folder of them")
        first = engines[0]
        self.name = first.name if name is None else name
        for engine in engines:
            for ours, theirs in ((first.inputs, engine.inputs), (first.outputs, engine.outputs)):
                kinds = [[(spec.name, spec.dtype, len(spec.dims)) for spec in one] for one in (ours, theirs)]
                if kinds[0] != kinds[1]:
                    raise InputError(f"the plans of {self.name} are not of one model: {kinds[0]} and {kinds[1]}")
        self.batched = all(_has_batch_axis(engine) and _is_independent(engine) for engine in engines)
        self._shapes: dict[Shapes, _Sizes] = {}
        for engine in engines:
            shapes = self._shapes_of([spec.dims for spec in engine.inputs])
            self._shapes.setdefault(shapes, _Sizes()).add(engine.inputs[0].dims[0] if self.batched else 1, engine)
        for sizes in self._shapes.values():
            sizes.close()
        self.inputs = self._specs([engine.inputs for engine in engines])
        self.outputs = self._specs([engine.outputs for engine in engines])

    def check(self, tensors: Sequence[torch.Tensor]) -> tuple[Shapes, int]:
        """Return what plans a call needs, and its number of rows, 1 where the model has no batch axis.

        Parameters
        ----------
        tensors : sequence of torch.Tensor
            One for each input.

        Raises
        ------
        InputError
            A tensor does not fit, or there is no plan for these sizes.
        """
        if len(tensors) != len(self.inputs):
            raise InputError(f"model {self.name} has {len(self.inputs)} inputs, got {len(tensors)}")
        for spec, tensor in zip(self.inputs, tensors, strict=True):
            if tensor.dtype != spec.dtype:
                raise InputError(f"input {spec.name} is {tensor.dtype}, model {self.name} takes {spec.dtype}")
            if tensor.dim() != len(spec.dims):
                raise InputError(f"input {spec.name} has {tensor.dim()} axes, model {self.name} takes {_text(spec)}")
        dims = [tuple(tensor.shape) for tensor in tensors]
        shapes = self._shapes_of(dims)
        if shapes not in self._shapes:
            known = " or ".join(sorted(", ".join(map(_sizes_text, one)) for one in self._shapes))
            names = ", ".join(spec.name for spec in self.inputs)
            what = "each row of " if self.batched else ""
            raise InputError(
                f"model {self.name} has no plan for {what}{names} of {', '.join(map(_sizes_text, shapes))}: "
                f"it has plans for {known}"
            )
        counts = {size[0] for size in dims} if self.batched else {1}
        if len(counts) > 1:
            counted = ", ".join(f"{spec.name} has {size[0]}" for spec, size in zip(self.inputs, dims, strict=True))
            raise InputError(f"the inputs have different numbers of rows: {counted}")
        return shapes, counts.pop()

    def most(self, shapes: Shapes) -> int:
        """Return the number of rows that are worth collecting for one run."""
        return self._shapes[shapes].best

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the model.

        Parameters
        ----------
        tensors : sequence of torch.Tensor
            One for each input, with any number of rows, the same in all.

        Raises
        ------
        InputError
            A tensor does not fit, or the model refuses a row's values; the message names the row.
        """
        shapes, count = self.check(tensors)
        sizes = self._shapes[shapes]
        if not self.batched:
            return list(sizes.engines[1].run(tensors))
        parts, first = [], 0
        for size in sizes.cover(count):
            parts.append(self._part(sizes.engines[size], size, [one[first : first + size] for one in tensors], first))
            first += size
        if not parts:
            return [torch.empty(0, *spec.dims[1:], dtype=spec.dtype) for spec in sizes.engines[sizes.best].outputs]
        return list(parts[0]) if len(parts) == 1 else [torch.cat(results) for results in zip(*parts, strict=True)]

    def run_each(self, requests: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor] | FmtpropError]:
        """Run several requests, those of equal sizes together.

        Parameters
        ----------
        requests : sequence of sequences of torch.Tensor
            As :meth:`run` takes them, with any number of rows each.

        Returns
        -------
        list
            For each request its results, or its own error.
        """
        answers: list[list[torch.Tensor] | FmtpropError] = [[] for _ in requests]
        groups: dict[object, list[int]] = {}
        for place, request in enumerate(requests):
            try:
                shapes, _ = self.check(request)
                groups.setdefault(shapes if self.batched else place, []).append(place)
            except FmtpropError as error:
                answers[place] = error
        for places in groups.values():
            for place, answer in zip(places, self._together([requests[place] for place in places]), strict=True):
                answers[place] = answer
        return answers

    def _together(self, requests: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor] | FmtpropError]:
        """Run requests of equal sizes as one; if that fails, one by one."""
        try:
            if len(requests) == 1:
                return [self.run(requests[0])]
            results = self.run([torch.cat(same) for same in zip(*requests, strict=True)])
        except FmtpropError as error:
            return [error] if len(requests) == 1 else [self._together([one])[0] for one in requests]
        counts = [len(one[0]) for one in requests]
        return [list(one) for one in zip(*(torch.split(result, counts) for result in results), strict=True)]

    def _part(self, engine: Engine, size: int, tensors: Sequence[torch.Tensor], first: int) -> Sequence[torch.Tensor]:
        """Run one plan on as many rows as it has, or fewer."""
        count = len(tensors[0])
        try:
            results = engine.run(tensors if count == size else [_filled(one, size) for one in tensors])
        except FmtpropError:
            for row in range(count):
                try:
                    engine.run([_filled(one[row : row + 1], size) for one in tensors])
                except FmtpropError as error:
                    raise InputError(f"row {first + row}: {error}") from error
            raise
        return results if count == size else [result[:count] for result in results]

    def _shapes_of(self, dims: Sequence[tuple[int, ...]]) -> Shapes:
        return tuple(one[1:] if self.batched else one for one in dims)

    def _specs(self, cases: Sequence[tuple[Spec, ...]]) -> tuple[Spec, ...]:
        """Return specs that hold for all plans."""
        made = []
        for same in zip(*cases, strict=True):
            columns = [set(sizes) for sizes in zip(*(spec.dims for spec in same), strict=True)]
            dims = [column.pop() if len(column) == 1 else -1 for column in columns]
            if self.batched:
                dims[0] = -1
            made.append(Spec(same[0].name, same[0].dtype, tuple(dims)))
        return tuple(made)


class _Sizes:
    """Plans for some numbers of equal rows."""

    def __init__(self) -> None:
        self.engines: dict[int, Engine] = {}
        self.best = 1
        self._covers: list[list[int]] = [[]]

    def add(self, rows: int, engine: Engine) -> None:
        self.engines[rows] = engine

    def close(self) -> None:
        """Find the plan that is best for many rows, and the best ones for each number below its rows."""
        known = all(engine.seconds > 0 for engine in self.engines.values())
        costs = {rows: engine.seconds if known else float(rows) for rows, engine in self.engines.items()}
        # of equal ones the largest: fewer calls
        self.best = min(costs, key=lambda rows: (costs[rows] / rows, -rows))
        totals = [0.0]
        for count in range(1, self.best):
            last = min(costs, key=lambda rows: (costs[rows] + totals[max(0, count - rows)], -rows))
            totals.append(costs[last] + totals[max(0, count - last)])
            self._covers.append([*self._covers[max(0, count - last)], last])
        self._covers = [sorted(cover, reverse=True) for cover in self._covers]

    def cover(self, count: int) -> list[int]:
        """Return the sizes of the runs for a number of rows."""
        full, rest = divmod(count, self.best)
        return [self.best] * full + self._covers[rest]


def _has_batch_axis(engine: Engine) -> bool:
    sizes = {spec.dims[:1] for spec in (*engine.inputs, *engine.outputs)}
    return len(engine.inputs) > 0 and len(sizes) == 1 and sizes not in ({()}, {(0,)})


def _is_independent(engine: Engine) -> bool:
    """Whether the first and the last row's results stay when the other rows change."""
    count = engine.inputs[0].dims[0]
    if count == 1:
        return True
    generator = torch.Generator().manual_seed(0)
    given = [_random(spec, generator) for spec in engine.inputs]
    expected = [result.clone() for result in engine.run(given)]
    for row in (0, count - 1):
        changed = [torch.zeros_like(one) if one.is_floating_point() else (one == 0).to(one.dtype) for one in given]
        for one, original in zip(changed, given, strict=True):
            one[row] = original[row]
        for result, before in zip(engine.run(changed), expected, strict=True):
            mine, same = result[row].double(), before[row].double()
            limit = _SAME * float(same.nan_to_num(posinf=0, neginf=0).abs().max()) if same.numel() else 0.0
            if not torch.allclose(mine, same, rtol=0, atol=limit, equal_nan=True):
                return False
    return True


def _random(spec: Spec, generator: torch.Generator) -> torch.Tensor:
    if spec.dtype.is_floating_point:
        return torch.randn(spec.dims, generator=generator).to(spec.dtype)
    return torch.randint(0, 2, spec.dims, generator=generator).to(spec.dtype)


def _filled(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat((tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])))


def _sizes_text(dims: Any) -> str:
    return "x".join(map(str, dims)) or "one number"


def _text(spec: Spec) -> str:
    return f"{len(spec.dims)}: {list(spec.dims)}"
