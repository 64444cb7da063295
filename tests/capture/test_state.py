"""Attributes that a forward pass changes: told where each call changes them, restored in any case."""

from __future__ import annotations

import pydoc
from collections import OrderedDict, deque
from contextlib import nullcontext
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.export import Dim

from fmtprop.capture import from_torch, state
from fmtprop.capture.torch_export import from_torch_symbolic
from fmtprop.errors import ImportModelError


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


class Collects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = Counts(), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.shape)
        return self.inner(x)


class Gradients(Counts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.func.grad(lambda y: self.linear(y).square().sum())(x) * self.calls


class MadeOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.size = None, (0,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.positions is None or self.size != x.shape:
            self.positions, self.size = [float(i) for i in range(x.shape[1])], x.shape
        return x + torch.tensor(self.positions)


@pytest.mark.parametrize(
    ("module", "names"),
    [(Counts(), "calls"), (Collects(), "inner.calls, seen"), (Gradients(), "calls")],
    ids=["number", "list", "derivatives"],
)
def test_state_is_told_and_restored(module, names):
    with pytest.warns(RuntimeWarning, match=rf"changes its attributes {names} at every call; a graph has no state"):
        from_torch(module.eval(), torch.randn(2, 4))
    assert getattr(module, "seen", []) == []
    assert getattr(module, "inner", module).calls == 0
    assert "forward" not in vars(module) and not module._forward_hooks


def test_what_is_made_once_is_no_state():
    module = MadeOnce().eval()
    from_torch(module, torch.randn(2, 4))
    assert module.positions is None and module.size == (0,)


def test_recurrent_layers_have_no_state():
    from_torch(nn.LSTM(4, 4, batch_first=True).eval(), torch.randn(1, 3, 4))


class Refuses(dict):
    """A dict whose methods all refuse to write, as diffusers' FrozenDict."""

    def _refuse(self, *_: object, **__: object) -> None:
        raise TypeError("this dict is frozen")

    __setitem__ = __delitem__ = clear = update = pop = popitem = setdefault = __copy__ = __deepcopy__ = _refuse


class Watched(list):
    """A list that counts what its own methods write."""

    def __init__(self, values: list[int]) -> None:
        super().__init__(values)
        self.writes = 0

    def append(self, value: object) -> None:
        self.writes += 1
        super().append(value)

    def clear(self) -> None:
        raise TypeError("not yours")

    extend = __setitem__ = __iadd__ = clear


class Slotted:
    __slots__ = ("calls", "unset")

    def __init__(self) -> None:
        self.calls = 0


class Holder:
    def __init__(self) -> None:
        self.calls, self.slotted, self.names = 0, Slotted(), {"b": [1], "a": [2]}


class Everything(nn.Module):
    """A module with attributes of all kinds, which its forward pass changes if `changes` is set."""

    __slots__ = ("slot",)

    def __init__(self, fails: type[BaseException] | None = None) -> None:
        super().__init__()
        self.linear, self.fails, self.changes = nn.Linear(4, 4), fails, False
        self.config = Refuses(size=4, inner=Refuses(a=1))
        self.frozen = MappingProxyType({"a": 1})
        self.watched, self.ordered = Watched([1, 2]), OrderedDict(b=1, a=2)
        self.recent, self.names, self.holder = deque([1, 2, 3], maxlen=3), {"x"}, Holder()
        self.unregistered = [nn.Linear(4, 4)]
        self.slot = 5
        self.register_buffer("steps", torch.zeros(1))

    @property
    def size(self) -> int:
        raise AttributeError("nobody asked")

    def __getattr__(self, name: str) -> object:
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.changes:
            self.watched.append(3)
            dict.__setitem__(self.config, "size", 5)
            self.ordered.move_to_end("b")
            self.recent.append(4)
            self.names.add("y")
            self.slot += 1
            self.holder.calls += 1
            self.holder.slotted.calls += 1
            self.holder.slotted.unset = 1
            self.holder.names["b"].append(2)
            del self.holder.names["a"]
            self.unregistered[0].extra = 1
            self.new, self.linear.new = 1, 2
            del self.frozen
        if self.fails is not None:
            self.steps.add_(1)
            raise self.fails
        return self.linear(x) * (1 + self.config["size"])


def _deep(module: Everything) -> object:
    """Return all that a module refers to, with identities."""
    holder, config = module.holder, module.config
    containers = (config, config["inner"], module.ordered, holder.names)
    lists = (module.watched, module.recent, module.names, module.unregistered, *holder.names.values())
    objects = (module, module.linear, module.unregistered[0], holder, module.watched)
    return (
        [(id(each), [(key, id(value)) for key, value in each.items()]) for each in containers],
        [(id(each), list(map(id, each))) for each in lists],
        [(id(each), {key: id(value) for key, value in vars(each).items()}) for each in objects],
        [list(vars(module)[name]) for name in ("_parameters", "_buffers", "_modules", "_forward_hooks")],
        [part.training for part in module.modules()],
        (module.slot, holder.slotted.calls, hasattr(holder.slotted, "unset"), module.frozen, module.steps.item()),
    )


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("fails", [None, ValueError, KeyboardInterrupt])
@pytest.mark.filterwarnings("ignore:Everything changes its attributes")
def test_nothing_of_the_users_differs(changes, fails):
    module = Everything(fails).train()
    module.linear.eval()
    module.changes = changes
    before = _deep(module)
    with pytest.raises((ImportModelError, KeyboardInterrupt)) if fails else nullcontext():
        from_torch(module, torch.randn(2, 4))
    assert _deep(module) == before


@pytest.mark.parametrize("place", ["torch.export.export", "fmtprop.capture.exporting.functools.wraps"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_leaves_nothing_behind(place, when, monkeypatch):
    module = Everything().train()
    module.changes = True
    own, before = pydoc.locate(place), _deep(module)

    def interrupted(*args: object, **kwargs: object) -> None:
        if when == "after":
            own(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        from_torch(module, kwargs={"x": torch.randn(2, 4)})
        from_torch_symbolic(Keywords(module), kwargs={"x": torch.randn(2, 4)}, dynamic_shapes={"x": {0: Dim.AUTO}})
    assert _deep(module) == before


class Keywords(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **kwargs: torch.Tensor) -> torch.Tensor:
        return self.inner(**kwargs)


def test_an_interrupt_while_changes_are_undone_comes_after_that(monkeypatch):
    module, calls = Everything(), []
    module.changes = True
    before, own = _deep(module), state._put_back

    def interrupted(holder: object) -> None:
        calls.append(holder)
        if len(calls) == 3:
            raise KeyboardInterrupt
        own(holder)

    with pytest.raises(KeyboardInterrupt), state.attributes_kept(module):
        module(torch.randn(2, 4))
        monkeypatch.setattr(state, "_put_back", interrupted)
    assert _deep(module) == before


def test_a_class_with_its_own_setattr_is_not_asked():
    class Strict(nn.Linear):
        def __setattr__(self, name: str, value: object) -> None:
            if name in ("forward", "_internal"):
                raise AttributeError("not assignable")
            super().__setattr__(name, value)

    module = Keywords(nn.Identity())
    from_torch(module, kwargs={"input": torch.randn(2, 4)})
    from_torch_symbolic(Strict(4, 4), kwargs={"input": torch.randn(2, 4)}, dynamic_shapes={"input": {0: Dim.AUTO}})
