"""Windows of a tensor (``unfold``) that are changed in place: right, or one error, by every way to compile."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.errors import ImportModelError


class Changed(nn.Module):
    """Doubles the windows of a copy of its input, or the first one."""

    def __init__(self, axis: int, size: int, step: int, first: bool, transposed: bool) -> None:
        super().__init__()
        self.windows, self.first, self.transposed = (axis, size, step), first, transposed

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x * 1.0).transpose(0, 1) if self.transposed else x * 1.0
        windows = y.unfold(*self.windows)
        (windows.select(self.windows[0], 0) if self.first else windows).mul_(2.0)
        return y + 1, windows * 1


APART = [(1, 6, 6), (1, 3, 3), (1, 2, 4), (0, 2, 1), (-1, 8, 1)]
#: they overlap, leave elements out, or their last step is not complete
OTHERS = [(1, 4, 1), (1, 3, 5), (1, 2, 3)]


def source(module: Changed) -> torch.Tensor:
    return torch.randn((8, 2) if module.transposed else (2, 8), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("windows", "first", "transposed"),
    [(one, i % 2 == 0, i % 4 < 2) for i, one in enumerate([*APART, *APART[:2]])],
)
def test_windows_that_lie_apart_are_changed(windows, first, transposed):
    module = Changed(*windows, first, transposed)
    x = source(module)
    for net in (fp.compile(module, (x,)), torch.compile(module, backend="fmtprop")):
        torch.testing.assert_close(net(x), module(x))
    torch._dynamo.reset()
    grads = []
    for net in (module, fp.compile(module, (x,), training=True, confirm=False)):
        leaf = x.clone().requires_grad_()
        y, found = net(leaf)
        (y.sum() + found.square().sum()).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("windows", OTHERS)
def test_other_windows_are_refused_or_left_to_pytorch(windows):
    module = Changed(*windows, first=True, transposed=False)
    x = source(module)
    for training in (False, True):
        with pytest.raises(ImportModelError, match="changes windows of a tensor"):
            fp.compile(module, (x,), training=training)
    torch.testing.assert_close(torch.compile(module, backend="fmtprop")(x), module(x))


def test_windows_of_a_tensor_that_changes_later_are_read_anew():
    class Later(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 1.0
            windows = y.unfold(1, 4, 1)
            y.mul_(2.0)
            return windows * 1

    x = torch.randn(2, 8)
    for net in (fp.compile(Later(), (x,)), torch.compile(Later(), backend="fmtprop")):
        torch.testing.assert_close(net(x), Later()(x))


def test_a_part_of_windows_that_overlap_is_one_of_them():
    class Part(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 1.0
            first, _ = y.unfold(0, 2, 1).chunk(2, 0)
            first[..., ::2] = 3.0
            return y

    x = torch.randn(3, 2)
    for training in (False, True):
        with pytest.raises(ImportModelError, match="changes windows of a tensor"):
            fp.compile(Part(), (x,), training=training)
    torch.testing.assert_close(torch.compile(Part(), backend="fmtprop")(x), Part()(x))
