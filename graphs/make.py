"""Make the built-in graph files from the architectures.

Each architecture is built with its seeded weights, imported as any model is, and saved with its weights described by
their initialisers. The files are the same on every machine, byte for byte, for one version of torch.

Run from the top of a checkout: ``python -m graphs.make`` for all, ``python -m graphs.make chain resnet50`` for some.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from torch import nn

from fmtprop.capture import from_torch
from fmtprop.errors import GraphError
from fmtprop.ir import Graph, file
from fmtprop.ir.initialiser import Initialiser
from graphs.architectures import ARCHITECTURES, initialise

__all__ = ["describe_weights", "import_architecture", "main", "write"]

FOLDER = Path(__file__).resolve().parent


def import_architecture(name: str) -> Graph:
    """Import one architecture as a graph whose weights are initialisers.

    >>> import_architecture("chain").constants["conv.bias"].kind
    'normal'
    """
    if name not in ARCHITECTURES:
        raise GraphError(f"there is no architecture {name!r}; there are {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[name]
    module = architecture.module()
    graph = from_torch(module, architecture.example_input(), name=name)
    describe_weights(graph, module)
    # without lines of this package's files: each edit of one would change all graphs
    return graph.map_nodes(lambda node: node.with_(origin=re.sub(r" ?\(?[\w.]+\.py:\d+\)?$", "", node.origin)))


def describe_weights(graph: Graph, module: nn.Module) -> None:
    """Replace the data of every constant that is in a module's state by its initialiser; others keep their data.

    `graph`: imported from that module; changed in place. `module`: its weights were made by
    :func:`graphs.architectures.initialise.apply`.
    """
    for name, tensor in module.state_dict().items():
        if name in graph.constants:
            graph.constants[name] = Initialiser.from_json(initialise.initialiser_of(name, tensor, module))


def write(name: str, folder: Path = FOLDER) -> Path:
    """Make the file of one architecture."""
    path = folder / f"{name}.json"
    file.save(import_architecture(name), path, weights="inline")
    return path


def main() -> None:
    """Make the files named on the command line, or all."""
    parser = argparse.ArgumentParser(description="Make the built-in graph files.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures; all by default")
    for name in parser.parse_args().names or ARCHITECTURES:
        path = write(name)
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
