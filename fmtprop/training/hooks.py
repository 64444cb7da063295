"""Hooks of the caller: a module that gets its first hook is captured again; by default, PyTorch does not look for one.

Owns the guard of captured graphs against new hooks of modules, and calls without hooks for saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._guards import Guard, TracingContext
from torch.nn.modules import module as modules
from torch.utils.hooks import RemovableHandle

#: name of Dynamo's guard of a module's list of hooks that is empty; by default, PyTorch installs nothing for it
_EMPTY = "EMPTY_NN_MODULE_HOOKS_DICT"

#: hooks for all modules, of which Dynamo does not guard the lists that are empty
_FOR_ALL = tuple(
    getattr(modules, f"_global_{kind}_hooks") for kind in ("forward_pre", "forward", "backward_pre", "backward")
)


def watch_hooks() -> None:
    """Add a guard to the graph in the making: no module that had no hooks has one, nor have all modules.

    PyTorch's own guard (``skip_nnmodule_hook_guards=False``) takes 1.6 us for each module and call, this one 0.3 us for
    all: it looks at the modules after a hook was registered anywhere.
    """
    context = TracingContext.try_get()
    if context is None:
        return
    guards = context.guards_context.dynamo_guards
    empty = [guard for guard in guards if guard.create_fn_name() == _EMPTY]
    if empty:
        guards.add(empty[0].originating_source.make_guard(partial(_install, empty)))


def _install(empty: Sequence[Guard], builder: Any, _: Guard) -> None:
    lists = [_value(builder, guard) for guard in empty]
    unchanged = _unchanged([*lists, *(hooks for hooks in _FOR_ALL if not hooks)])
    code = ["___fmtprop_no_new_hooks()"]
    builder.add_python_lambda_leaf_guard_to_root(code, code, closure_vars={"___fmtprop_no_new_hooks": unchanged})


def _value(builder: Any, guard: Guard) -> Any:
    try:
        return builder.get(guard)
    except TypeError:  # until PyTorch 2.9, by name
        return builder.get(guard.name)


def _unchanged(hooks: Sequence[Any]) -> Callable[[], bool]:
    """Return a function that says whether all lists of hooks are still empty."""
    seen = RemovableHandle.next_id

    def unchanged() -> bool:
        nonlocal seen
        if RemovableHandle.next_id != seen:
            if any(hooks):
                return False
            seen = RemovableHandle.next_id
        return True

    return unchanged


@contextmanager
def no_hooks_for_saved_tensors() -> Iterator[None]:
    """Hide the caller's hooks for saved tensors, of checkpointing for instance."""
    autograd: Any = torch._C._autograd
    hooks = []
    while (pair := autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(pair)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(*pair)
