"""External data that lie: each model has its weights from its own folder, or ends in one ImportModelError.

``python -m tests.onnx.fuzz_external 0:500`` changes places, sizes and files of a model's external data, one
to three times for each seed, and prints each break of the rule. A secret lies next to the folder, in it behind links,
and in files that are none.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto

from fmtprop.onnx.model import from_onnx
from tests.onnx.fuzz import measured

SECRET = 4242.0
#: numbers of the data file
DATA = np.arange(96, dtype=np.float32)
TEXT = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[4, 8] x) => (float[4, 8] y) { a = Add(x, u) b = Mul(a, v) y = Add(b, w) }
"""
LOCATIONS = [
    "data", "./data", "sub/data", "sub/../data", "sub/./data", "data/", "data//", "//data", "sub//data", "DATA",
    "data ", " data", "data\n", "data\0", "data\0.bin", "d\u0430ta", "dat\u0301a", "%64ata", "~/data", "$HOME", ".",
    "..", "", "../secret", "../models/data", "sub/../../secret", "link", "chain", "linked/secret", "linked/../secret",
    "hard", "fifo",
    "folder", "socket", "hole", "empty", "unreadable", "model.onnx", "/dev/zero", "/dev/stdin", "/proc/self/environ",
    "/proc/self/fd/0", "file:data", "file:///etc/passwd", "http://localhost/data", "C:\\data", "..\\secret", "d" * 300,
    "/".join(["sub"] * 50 + ["data"]), "sub/" * 3000 + "data", "con", "*", "[d]ata", "data?x=1", "\udcff", "-rf",
]  # fmt: skip
SIZES = [
    "0", "4", "8", "127", "128", "129", "256", "384", "385", "1000000", "-1", "-0", "+4", " 4", "4 ", "0x10", "1e2",
    "4.0", "\uff14", "\u0664", "", "nan", "inf", "None", "0" * 17 + "4", "0" * 40 + "4", "9" * 18, "9" * 19, "9" * 5000,
    str(2**31), str(2**32), str(2**63 - 1), str(2**63), str(2**64), str(2**64 - 128), "1_0", "4,0", "4\0",
]  # fmt: skip
DIMS = [[4, 8], [8], [1, 8], [4, 1], [32], [], [0], [0, 8], [4, 8, 1], [96], [97], [1 << 20],
        [1 << 33], [1 << 40], [-1], [-4, -8], [1 << 62, 4], [2] * 70]  # fmt: skip
KEYS = ["location", "offset", "length", "checksum", "LOCATION", "", "basepath", "k" * 5000]


def folder(place: Path) -> Path:
    """Make the model's folder and its surroundings."""
    secret = np.full(96, SECRET, np.float32).tobytes()
    (place / "secret").write_bytes(secret)
    home = place / "models"
    (home / "sub").mkdir(parents=True)
    (home / "folder").mkdir()
    for name in ("data", "sub/data", "-rf", "*"):
        (home / name).write_bytes(DATA.tobytes())
    (home / "empty").touch()
    (home / "unreadable").write_bytes(DATA.tobytes())
    (home / "unreadable").chmod(0)
    (home / "link").symlink_to("../secret")
    (home / "chain").symlink_to("link")
    (home / "linked").symlink_to("..", target_is_directory=True)
    (home / "hard").hardlink_to(place / "secret")
    (home / "hole").touch()
    os.truncate(home / "hole", 1 << 40)
    os.mkfifo(home / "fifo")
    os.mknod(home / "socket", 0o140600)
    return home


def model() -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(onnx.parser.parse_model(TEXT))
    for index, name in enumerate("uvw"):
        tensor = made.graph.initializer.add(name=name, data_type=TensorProto.FLOAT, dims=[4, 8])
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "data"), ("offset", str(128 * index)), ("length", "128")):
            tensor.external_data.add(key=key, value=value)
    return made


def change(made: onnx.ModelProto, draw: random.Random) -> None:
    """Change one thing about the external data of one tensor."""
    tensor = draw.choice(made.graph.initializer)
    entries = {entry.key: entry for entry in tensor.external_data}

    def entry(key: str, values: list[str]) -> None:
        found = entries.get(key) or tensor.external_data.add(key=key)
        value = draw.choice(values)
        found.value = value.encode("utf-8", "replace").decode()

    ways: list[Callable[[], object]] = [
        lambda: entry("location", LOCATIONS),
        lambda: entry("location", LOCATIONS),
        lambda: entry("offset", SIZES),
        lambda: entry("length", SIZES),
        lambda: tensor.external_data.add(key=draw.choice(KEYS), value=draw.choice(SIZES)),
        lambda: tensor.external_data.pop(draw.randrange(len(tensor.external_data))) if tensor.external_data else None,
        lambda: (tensor.ClearField("dims"), tensor.dims.extend(draw.choice(DIMS))),
        lambda: setattr(tensor, "data_type", draw.choice([*range(26), 99, -1])),
        lambda: setattr(tensor, "raw_data", draw.choice([b"", bytes(128), bytes(7)])),
        lambda: tensor.float_data.extend([1.0] * draw.choice([1, 32])),
        lambda: setattr(tensor, "data_location", draw.choice([0, 1])),
        lambda: setattr(tensor, "name", draw.choice(["u", "v", "x", "y", "", "a"])),
        lambda: made.graph.initializer.add().CopyFrom(tensor),
    ]  # fmt: skip
    draw.choice(ways)()


def check(seed: int, home: Path) -> str:
    """Return how the import ends: ``"graph"``, ``"refused"``, or the rule that is broken."""
    draw = random.Random(seed)
    made = model()
    for _ in range(draw.randrange(1, 4)):
        change(made, draw)
    path = home / "model.onnx"
    path.write_bytes(made.SerializeToString())

    def load() -> str:
        graph = from_onnx(path)
        for name, tensor in graph.constants.items():
            if isinstance(tensor, torch.Tensor) and (tensor == SECRET).any():
                return f"constant {name} is the secret"
        return "graph"

    return measured(f"seed {seed}", load)


def main(seeds: str) -> int:
    first, last = map(int, seeds.split(":"))
    with tempfile.TemporaryDirectory() as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        home = folder(Path(temporary))
        ends = [check(seed, home) for seed in range(first, last)]
        (home / "unreadable").chmod(0o600)
    found = [end for end in ends if end not in ("graph", "refused")]
    print(*found, sep="\n")
    print(f"{len(ends)} models: {ends.count('graph')} imported, {ends.count('refused')} refused, {len(found)} findings")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
