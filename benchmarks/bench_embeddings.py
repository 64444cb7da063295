"""Texts a second of sentence encoders: 1 000 texts of mixed lengths, embedded as sentence-transformers does it.

``python -m benchmarks.bench_embeddings minilm bge-small bge-base --dtype f32 bf16`` sorts seeded texts by length, takes
32 at a time, pads them to the longest of these, and normalises the mean of the tokens (MiniLM) or the first one (BGE).
Each contender has a process, embeds all texts once before it is timed, and must come near PyTorch's f32 embeddings of
each text alone. Then contenders take turns, each with all texts. fmtprop has plans for some lengths
(``buckets=``), and pads what is between; the others run the lengths as they are. OpenVINO, which prepares kernels for
each length, runs fmtprop's lengths, too: what is faster counts.

The target: 1.3 times the texts a second of the best other. A missed target does not change the exit code, which is 1
where embeddings are wrong or a contender failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn.functional import normalize

from benchmarks.common import table, warn_if_busy, write_json
from fmtprop.api import compile as compile_model
from fmtprop.bench.environment import Environment
from fmtprop.bench.peers import OnnxRuntime, OpenVINO, Peer, TorchEager
from fmtprop.bench.processes import converse
from fmtprop.errors import FmtpropError
from fmtprop.runtime.process import use_threads

TARGET = 1.3

#: texts, of a batch those that are embedded together, as sentence-transformers does by default
TEXTS, BATCH = 1000, 32

#: tokens: least and most of a text, the median, and the spread of its logarithm: sentences, with some paragraphs
LEAST, MOST, MEDIAN, SPREAD = 4, 256, 40, 0.8

#: lengths with plans: a sixteenth of the length apart, or nearly so, so that padding costs little for all of them
LENGTHS = (*range(4, 65, 4), *range(72, 129, 8), *range(144, MOST + 1, 16))

#: tokens of a text in the example that models are exported and compiled with
EXAMPLE = 64

#: largest difference of a number of an embedding, whose numbers' squares add up to 1
TOLERANCES = {"f32": 1e-4, "bf16": 2e-2}

Batches = Sequence[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Shape:
    """The sizes of an encoder, and whether an embedding is the mean of the tokens."""

    hidden: int
    layers: int
    is_mean: bool


SHAPES = {"minilm": Shape(384, 6, True), "bge-small": Shape(384, 12, False), "bge-base": Shape(768, 12, False)}


class Encoder(nn.Module):
    """Seeded weights in BERT's architecture, with the pooling of a sentence encoder."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        torch.manual_seed(0)
        sizes = {"hidden_size": shape.hidden, "intermediate_size": 4 * shape.hidden, "num_attention_heads": 12}
        config = BertConfig(num_hidden_layers=shape.layers, **sizes)
        self.bert, self.is_mean = BertModel(config, add_pooling_layer=False), shape.is_mean
        self.eval()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return n x hidden embeddings of n texts of as many tokens; `mask` is 0 where a text has none."""
        tokens = self.bert(input_ids=ids, attention_mask=mask, return_dict=False)[0]
        if not self.is_mean:
            return normalize(tokens[:, 0], dim=-1)
        some = mask.unsqueeze(-1).to(tokens.dtype)
        return normalize((tokens * some).sum(1) / some.sum(1), dim=-1)


def texts() -> list[torch.Tensor]:
    """Return the tokens of seeded texts."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(TEXTS, generator=generator) * SPREAD).exp().mul(MEDIAN).long().clamp(LEAST, MOST)
    return [torch.randint(1000, 30000, (int(length),), generator=generator) for length in lengths]


def batches(given: Sequence[torch.Tensor], lengths: Sequence[int] = ()) -> tuple[Batches, torch.Tensor]:
    """Return batches of texts of similar lengths, and the texts' places in them.

    `lengths`: those that batches are padded to; by default, that of the longest text.
    """
    order = sorted(range(len(given)), key=lambda place: len(given[place]))
    made = []
    for first in range(0, len(order), BATCH):
        some = [given[place] for place in order[first : first + BATCH]]
        length = next((one for one in lengths if one >= len(some[-1])), len(some[-1]))
        ids, mask = torch.zeros(len(some), length, dtype=torch.long), torch.zeros(len(some), length, dtype=torch.long)
        for row, tokens in enumerate(some):
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        made.append((ids, mask))
    return made, torch.tensor(order)


def _dynamic() -> tuple[dict[int, Any], dict[int, Any]]:
    count, length = torch.export.Dim("count", min=2, max=BATCH), torch.export.Dim("length", min=2, max=MOST)
    return {0: count, 1: length}, {0: count, 1: length}


def ours(shape: Shape, dtype: str, threads: int) -> Callable[..., Any]:
    """Return fmtprop's model with plans for some lengths."""
    use_threads(threads)
    example = torch.ones(BATCH, EXAMPLE, dtype=torch.long)
    return compile_model(
        Encoder(shape),
        (example, example.clone()),
        dtype=dtype,
        dynamic_shapes=_dynamic(),
        buckets={"ids": {1: LENGTHS}},
        max_shapes=4 * len(LENGTHS),
    )


def theirs(shape: Shape, peer: Peer, threads: int) -> Callable[..., Any]:
    """Return another runtime's model."""
    example = torch.ones(BATCH, EXAMPLE, dtype=torch.long)
    run = peer.prepare(Encoder(shape), (example, example.clone()), threads)

    def first(*inputs: torch.Tensor) -> torch.Tensor:
        made = run(*inputs)
        return made if isinstance(made, torch.Tensor) else made[0]

    return first


def embedding(
    prepare: Callable[[], Callable[..., Any]], lengths: Sequence[int], expected: torch.Tensor, tolerance: float
) -> Callable[[], float]:
    """Prepare a contender, check its embeddings of all texts, and return the function of a turn: texts a second."""
    run = prepare()
    given = texts()

    def turn() -> float:
        start = perf_counter()
        made, order = batches(given, lengths)
        with torch.inference_mode():
            found = torch.empty_like(expected)
            found[order] = torch.cat([run(*batch).float() for batch in made])
        seconds = perf_counter() - start
        error = float((found - expected).abs().max())
        if not error <= tolerance:
            raise FmtpropError(f"an embedding differs by {error:.1e} from PyTorch's, more than {tolerance:.0e}")
        return len(given) / seconds

    turn()  # plans, and what others make at their first calls
    return turn


def export(shape: Shape, path: Path) -> None:
    """Write an encoder for any number of texts, and any number of tokens, as an ONNX file."""
    example = torch.ones(BATCH, EXAMPLE, dtype=torch.long)
    torch.onnx.export(
        Encoder(shape), (example, example.clone()), str(path), dynamo=True, dynamic_shapes=_dynamic(), verbose=False
    )


def expected_of(shape: Shape) -> torch.Tensor:
    """Return PyTorch's embeddings, of each text alone."""
    encoder = Encoder(shape)
    with torch.inference_mode():
        return torch.cat([encoder(one[None], torch.ones_like(one)[None]) for one in texts()])


def contenders(
    shape: Shape, dtype: str, onnx: Path, threads: int
) -> dict[str, tuple[Callable[..., Any], Sequence[int]]]:
    """Return what makes each contender, and the lengths that its batches are padded to."""
    peers: dict[str, Peer] = {"torch": TorchEager(precision=dtype), "openvino": OpenVINO(precision=dtype, onnx=onnx)}
    if dtype == "f32":
        peers["onnxruntime"] = OnnxRuntime(onnx=onnx)
    made: dict[str, tuple[Callable[..., Any], Sequence[int]]] = {"fmtprop": (partial(ours, shape, dtype, threads), ())}
    made |= {name: (partial(theirs, shape, peer, threads), ()) for name, peer in peers.items()}
    made["openvino, padded"] = made["openvino"][0], LENGTHS
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table for each encoder and data type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(SHAPES), choices=[*SHAPES, []], metavar="MODEL")
    parser.add_argument("--dtype", nargs="+", default=["f32"], choices=TOLERANCES)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to a file")
    given = parser.parse_args(arguments)
    warn_if_busy(os.getloadavg()[0])
    figures: dict[str, dict[str, list[float]]] = {}
    tokens = [len(one) for one in texts()]
    print(f"{TEXTS} texts of {min(tokens)} to {max(tokens)} tokens, {sum(tokens)} in all; {given.threads} threads")
    with TemporaryDirectory() as folder:
        for model in given.models:
            expected, onnx = expected_of(SHAPES[model]), Path(folder) / f"{model}.onnx"
            export(SHAPES[model], onnx)
            for dtype in given.dtype:
                made = contenders(SHAPES[model], dtype, onnx, given.threads)
                prepares = {
                    name: partial(embedding, prepare, lengths, expected, TOLERANCES[dtype])
                    for name, (prepare, lengths) in made.items()
                }
                rates = figures[f"{model} {dtype}"] = converse(prepares, given.rounds)
                middle = {name: median(found) for name, found in rates.items()}
                best = max(rate for name, rate in middle.items() if name != "fmtprop")
                rows = [[name, f"{rate:.0f}", f"{middle['fmtprop'] / rate:.2f}"] for name, rate in middle.items()]
                title = f"{model}, {dtype}; {Environment.capture(given.threads).cpu}"
                print(table(title, ["", "texts/s", "fmtprop over it"], rows))
                ratio = middle["fmtprop"] / best
                met = "met" if ratio >= TARGET else "missed"
                print(f"fmtprop over the best other: {ratio:.2f}, target {TARGET}: {met}", flush=True)
    write_json(given.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
