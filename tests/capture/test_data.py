"""``tensor.data`` in a forward pass, and state that it writes."""

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop.capture import from_torch
from fmtprop.errors import ImportModelError


class Data(nn.Module):
    """Two convolutions, and what is done with their data."""

    def __init__(self, run):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.run = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3), run

    def forward(self, x):
        return self.run(self, x)


def assign(net, x):
    net.b.weight.data = 2 * net.a.weight.data.clone()
    return net.b(x)


def copy(net, x):
    net.b.weight.data.copy_(2 * net.a.weight)
    return net.b(x)


def read(net, x):
    return net.b(x) + net.a.bias.data.mean()


def assign_activation(net, x):
    y = 2 * x
    y.data = x + 1
    return net.b(y)


def change_activation(net, x):
    y = 2 * x
    y.data.add_(1)
    return net.b(y)


def clamp(net, x):
    net.b.weight.data.clamp_(0, 1)
    return net.b(x)


def of_input(net, x):
    net.b.bias.data.copy_(x.mean())
    return net.b(x)


def read_before(net, x):
    """The first call reads another number than later ones."""
    y = net.b(x)
    net.b.weight.data = 2 * net.a.weight.data.clone()
    return y


X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("run", [assign, copy, read, assign_activation, change_activation])
def test_data_are_read_and_written_as_in_pytorch(run):
    expected = Data(run)(X)
    torch.testing.assert_close(fp.compile(Data(run), X, tune="model", confirm=False)(X), expected)


@pytest.mark.parametrize("run", [clamp, of_input, read_before])
def test_state_that_depends_on_the_call_before_or_on_an_input_is_refused(run):
    with pytest.raises(ImportModelError, match=r"changes its parameter 'b\..*change it once before compiling"):
        from_torch(Data(run), X)


def test_a_program_with_a_constant_without_data_is_refused_before_torch_reads_it():
    with torch.no_grad():
        program = torch.export.export(Data(read), (X,), strict=True)
    with pytest.raises(ImportModelError, match=r"constant 'lifted_tensor_0' has no data.*tensor\.detach\(\)"):
        from_torch(program)


class Recurrent(nn.Module):
    """Recurrent layers in a list and a module that can assign a tensor to itself."""

    def __init__(self, assigns):
        super().__init__()
        self.layers, self.assigns, self.last = nn.ModuleList([nn.GRU(4, 4), nn.LSTM(4, 4)]), assigns, torch.zeros(1)

    def forward(self, x):
        x = self.layers[1](self.layers[0](x)[0])[0]
        if self.assigns:
            self.last = x + 1
        return x


@pytest.mark.filterwarnings("error")
def test_the_weights_of_recurrent_layers_are_exported_without_a_warning():
    from_torch(Recurrent(assigns=False).eval(), torch.randn(3, 1, 4))


def test_the_warning_of_a_user_s_tensor_that_is_assigned_is_shown_beside_recurrent_layers():
    with pytest.warns(UserWarning, match=r"self\.last"):
        from_torch(Recurrent(assigns=True).eval(), torch.randn(3, 1, 4))
