"""Methods of modules, compiled as modules."""

from __future__ import annotations

import torch
from torch import nn

import fmtprop as fp


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 2), nn.Linear(2, 4)

    def encode(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.encoder(x) * scale

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self.decoder(z)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


def test_a_method_compiles_as_a_module():
    coder, x = Coder(), torch.randn(3, 4)
    before = {name: id(value) for name, value in vars(coder).items()}
    encode = fp.compile(coder.encode, x, kwargs={"scale": 2.0})
    decode = fp.compile(coder.decode, torch.randn(3, 2), dynamic_shapes={"z": {0: torch.export.Dim.AUTO}})
    assert encode.compilation.imported.name == "Coder.encode"
    with torch.no_grad():
        torch.testing.assert_close(encode(x, scale=2.0), coder.encode(x, scale=2.0))
        torch.testing.assert_close(decode(encode(x, scale=2.0)), coder.decode(coder.encode(x, scale=2.0)))
    assert {name: id(value) for name, value in vars(coder).items()} == before
