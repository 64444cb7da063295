"""Modules whose forward pass computes derivatives."""

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.errors import ImportModelError
from tests.capture.checking import compare


class Potential(nn.Module):
    """An energy and its forces."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
        self.register_buffer("scale", torch.tensor(2.0))
        self.last = None

    def forward(self, places, *, factor=1.0):
        with torch.enable_grad():
            places = places.detach().requires_grad_()
            energy = self.net(places * self.scale).sum() * factor
            (gradient,) = torch.autograd.grad(energy, places)
        self.last = gradient
        return {"energy": energy.detach(), "forces": -gradient}


class Residual(nn.Module):
    """The residual of a differential equation, by function transforms."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, points):
        def value(point):
            return self.net(point).squeeze(-1)

        slopes = torch.func.vmap(torch.func.grad(value))(points)
        return torch.func.vmap(value)(points) * slopes[:, 0] + slopes[:, 1]


class Divergence(Potential):
    """Derivatives in forward mode, with a number of PyTorch's between."""

    def forward(self, places):
        slopes = torch.func.vmap(torch.func.jacfwd(lambda place: self.net(place) * self.scale))(places)
        return slopes.sum((1, 2))


class Laplacian(Residual):
    """The trace of a Hessian, behind a normalization."""

    def __init__(self):
        super().__init__()
        self.net.insert(2, nn.LayerNorm(8))

    def forward(self, points):
        curvature = torch.func.vmap(torch.func.hessian(lambda point: self.net(point).squeeze(-1)))(points)
        return curvature.diagonal(dim1=1, dim2=2).sum(1)


class Direction(nn.Module):
    """How attention changes along a direction: torch.export leaves calls of the transform in its program."""

    def forward(self, x):
        def value(x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

        return torch.func.jvp(value, (x,), (torch.ones_like(x),))[1]


class Dual(Residual):
    """Dual numbers: torch.export's program has no result."""

    def forward(self, points):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(points, torch.ones_like(points))
            return torch.autograd.forward_ad.unpack_dual(self.net(dual)).tangent


@pytest.mark.parametrize(
    ("model", "size", "kwargs"),
    [
        (Potential, (5, 3), {"factor": 3.0}),
        (Residual, (7, 2), {}),
        (Divergence, (5, 3), {}),
        (Laplacian, (7, 2), {}),
        (Direction, (2, 5, 8), {}),
        (Dual, (7, 2), {}),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # PyTorch's first forward derivative uses it
def test_derivatives_are_calls_of_the_graph(model, size, kwargs):
    module = model().eval()
    if model is Direction:
        try:
            module(torch.randn(size))
        except NotImplementedError as error:  # torch 2.14
            pytest.skip(str(error))
    before = dict(vars(module))
    net = fp.compile(module, torch.randn(size), kwargs=kwargs)
    assert vars(module) == before
    given = torch.randn(size)  # other numbers than those of the trace
    expected, got = module(given, **kwargs), net(given, **kwargs)
    if isinstance(expected, dict):
        assert list(got) == list(expected)
        expected, got = (
            torch.cat([v.flatten() for v in expected.values()]),
            torch.cat([v.flatten() for v in got.values()]),
        )
    compare(got, expected)


def test_a_branch_on_a_derivative_is_refused():
    class Branching(Residual):
        def forward(self, points):
            slopes = super().forward(points)
            return slopes if slopes.sum() > 0 else -slopes

    with pytest.raises(ImportModelError, match="cannot export Branching"):
        fp.compile(Branching().eval(), torch.randn(7, 2))


@pytest.mark.parametrize("derivative", [torch.func.hessian, lambda f: torch.func.jacfwd(torch.func.grad(f))])
def test_forward_gradients_of_parameters_begin_with_zeros_that_have_memory(derivative):
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(8, 4), torch.randn(8)  # the parameters' tangents are zeros without memory in PyTorch

    def second(x):
        return derivative(lambda z: layer(z).tanh().sum())(x)

    torch._dynamo.reset()
    net = torch.compile(second, backend="fmtprop", options={"tune": "model", "confirm": False})
    torch.testing.assert_close(net(x), second(x))
