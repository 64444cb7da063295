"""Complex tensors inside a model are computed by PyTorch, on their real and imaginary parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmtprop as fp
from fmtprop import dnnl
from fmtprop.errors import GraphError, ImportModelError
from fmtprop.ir import TensorType
from fmtprop.ops.host import infer
from fmtprop.ops.host_call import HostCall
from tests.modules import Function


class Mixer(nn.Module):
    """As FNet mixes tokens."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return x + nn.functional.gelu(self.linear(self.norm(torch.fft.fft2(x).real)))


class Rotary(nn.Module):
    """As Llama's own code turns queries: a complex buffer, and pairs of channels."""

    def __init__(self):
        super().__init__()
        angles = torch.outer(torch.arange(8.0), 10000 ** -torch.arange(0, 1, 0.25))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns).flatten(-2)


class GlobalFilter(nn.Module):
    """As GFNet filters: a real parameter that is read as a complex one."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(8, 14, 8, 2))

    def forward(self, x):
        z = torch.fft.rfft2(self.conv(x), norm="ortho") * torch.view_as_complex(self.weight)
        return torch.relu(torch.fft.irfft2(z, s=(14, 14), norm="ortho"))


def _made_inside(x):
    turns = torch.exp(1j * torch.arange(16.0))
    return (x * turns).real + (x * turns.conj()).imag


def _spectrogram(x):
    window = torch.hann_window(32)
    z = torch.stft(x, 32, 8, window=window, return_complex=True)
    frames = torch.fft.irfft(z, dim=1) * window[:, None]
    whole = nn.functional.fold(frames, (1, 32 + 8 * (z.shape[-1] - 1)), (1, 32), stride=(1, 8))
    return z.abs().pow(2), whole[:, 0, 0, 16:-16]


def _filtered_sound(x):
    window = torch.hann_window(32)
    z = torch.stft(x, 32, 8, window=window, return_complex=True)
    return torch.istft(z * z.abs().sigmoid(), 32, 8, window=window, length=x.shape[-1])


def _stacked(x):
    z = torch.fft.fft(x)
    return torch.cat([z, z.conj()], 1).mean(1).imag, torch.stack([z, -z])[1, :, 2:5].transpose(0, 1).abs()


def _solved(x):
    values, vectors = torch.linalg.eig(x @ x.mT + torch.eye(6))
    return values.abs().sort(-1).values, (vectors @ torch.diag_embed(values) @ torch.linalg.inv(vectors)).real


def _moved(x):
    """Calls that move both parts alike, with axes counted from both ends."""
    z = torch.fft.fft(x)
    a = z.flip(-1).unsqueeze(1).expand(-1, 3, -1, -1).permute(0, 2, 1, 3).reshape(2, 8, -1)
    b = torch.cat([a[..., 1::2], a.roll(3, -1)[..., :5]], -1) + z[:, 2:3, :1] - z.select(-1, 2).unsqueeze(-1)
    out = torch.zeros(2, 8, 40, dtype=torch.complex64)
    out[:, 1:, 3:32] = b[:, 1:]
    whole = torch.stack([out, -out], -1).split([1, 1], -1)[1].squeeze(-1).transpose(1, -1)
    return torch.view_as_real(whole), whole[:, ::3].abs(), z.roll(3).add(z.mT.reshape(2, 8, 16), alpha=2).real


X = (2, 8, 16)
MODELS = {
    "fnet": (Mixer(), X),
    "rotary": (Rotary(), (2, 8, 8)),
    "global filter": (GlobalFilter(), (1, 3, 14, 14)),
    "made inside": (Function(_made_inside), X),
    "stft": (Function(_spectrogram), (2, 160)),
    "istft": (Function(_filtered_sound), (2, 160)),
    "stacked": (Function(_stacked), X),
    "moved": (Function(_moved), X),
    "abs and angle": (Function(lambda x: (lambda z: (z.abs(), z.angle() + 1))(torch.complex(x, x + 1))), X),
    "f64": (Function(lambda x: torch.fft.ifft(torch.fft.fft(x.double())).real), X),
    "scaled": (Function(lambda x: torch.view_as_real(2j * torch.view_as_complex(x) + (1 - 1j))), (4, 2)),
    "dtypes": (Function(lambda x: x.to(torch.complex64).conj().to(torch.complex128).imag.float()), X),
    "eigenvalues": (Function(_solved), (6, 6)),
}


@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
@pytest.mark.parametrize(("name", "policy"), [(one, ("plain", "optimal")[i % 2]) for i, one in enumerate(MODELS)])
def test_complex_tensors_inside(name, policy):
    torch.manual_seed(0)
    model, dims = MODELS[name]
    model, x = model.eval(), torch.randn(dims)
    net = fp.compile(model, x, policy=policy, tune="model", confirm=False)
    for _ in range(2):
        x = torch.randn(dims)
        with torch.no_grad():
            torch.testing.assert_close(net(x), model(x), atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not dnnl.supports("bf16"), reason="oneDNN has no bf16 on this CPU")
def test_narrow_models_compute_them_in_f32():
    model, x = Mixer().eval(), torch.randn(X)
    got = fp.compile(model, x, dtype="bf16", tune="model", confirm=False)(x)
    with torch.no_grad():
        assert ((got - model(x)).abs().max() / model(x).abs().max()).item() < 3e-2


def test_an_input_that_begins_between_two_pairs():
    # where PyTorch itself refuses
    model, x = Rotary(), torch.randn(2 * 8 * 8 + 1)[1:].view(2, 8, 8)
    torch.testing.assert_close(fp.compile(model, x, tune="model", confirm=False)(x), model(x.clone()))


def test_a_graph_file_has_them(tmp_path):
    graph = fp.from_torch(Rotary(), torch.randn(2, 8, 8))
    fp.save(graph, tmp_path / "rotary.json")
    x = torch.randn(2, 8, 8)
    net = fp.compile(fp.load(tmp_path / "rotary.json"), tune="model", confirm=False)
    torch.testing.assert_close(net(x), Rotary()(x))


def test_torch_compile_runs_them():
    model, x = Mixer().eval(), torch.randn(X)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="fmtprop")(x), model(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (
            Function(lambda x: torch.fft.fft(x)),
            torch.randn(3),
            "output .* is torch.complex64; inputs and",
        ),
        (Function(lambda x: x.real), torch.randn(3) + 1j, "input .* is torch.complex64; inputs and"),
    ],
)
def test_inputs_and_outputs_are_real(model, inputs, message):
    with pytest.raises(ImportModelError, match=message):
        fp.from_torch(model, inputs)


@pytest.mark.parametrize("given", ['{"complex": [1]}', '{"complex": "1j"}', '{"parts": "x"}', '{"parts": ["src_0"]}'])
def test_what_a_file_says_wrongly_is_refused(given):
    call = HostCall("aten.mul.Tensor", f'{{"self": {{"tensor": "src_0"}}, "other": {given}}}')
    with pytest.raises(GraphError, match="is neither a tensor nor a number"):
        infer(call, {"src_0": TensorType((3, 2))})


def test_a_slice_of_complex_numbers_is_no_step():
    """A Fourier layer keeps some frequencies, and writes them to zeros."""
    net = fp.compile(
        Function(lambda x: torch.fft.rfft2(x)[..., :4, :3].abs()), torch.randn(2, 3, 16, 16), policy="plain"
    )
    assert [step.node.attrs.target for step in net.plan.steps] == ["aten.fft_rfft2.default", "aten.abs.default"]
