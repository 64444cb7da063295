"""The second process of a script with a model of transformers: its first answer's time over the first process's.

``python -m benchmarks.bench_second_process bert gpt2 llama`` takes seeded models through two doors, in turns, with an
empty cost store each time: ``torch.compile`` with PyTorch's artefacts, and a plan file. Each second answer has the
first one's bits, and is close to eager PyTorch's. Times begin when the model is there; imports are a column of their
own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

#: argument: folder, model, door, "first" or "second"; prints seconds and the bits of the answer
PROCESS = """
import hashlib, json, sys, time
from pathlib import Path
import torch, transformers
folder, name, door, which = Path(sys.argv[1]), *sys.argv[2:]
torch.manual_seed(0)
def bert():
    return transformers.BertModel(transformers.BertConfig()), {"attention_mask": torch.ones(1, 128, dtype=torch.long)}
def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=6)), {"use_cache": False}
def llama():
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=8000,
    )
    return transformers.LlamaForCausalLM(config), {"use_cache": False}
module, inputs = globals()[name]()
module.eval()
inputs["input_ids"] = torch.randint(0, 1000, (1, 128))
file, laps = folder / f"{name}.{door}", [time.perf_counter()]
with torch.no_grad():
    if door == "compile":
        import fmtprop.dynamo
        laps.append(time.perf_counter())
        if which == "second":
            torch.compiler.load_cache_artifacts(file.read_bytes())
        net = torch.compile(module, backend="fmtprop")
    else:
        import fmtprop as fp
        laps.append(time.perf_counter())
        net = fp.compile(module, kwargs=inputs) if which == "first" else fp.load_plan(file, on_mismatch="error")
    answer = net(**inputs)[0]
    laps.append(time.perf_counter())
    torch.testing.assert_close(answer, module(**inputs)[0], rtol=1e-3, atol=1e-3)
if which == "first" and door == "compile":
    file.write_bytes(torch.compiler.save_cache_artifacts()[0])
elif which == "first":
    net.save(file)
print(json.dumps([laps[1] - laps[0], laps[2] - laps[1], hashlib.sha256(answer.numpy().tobytes()).hexdigest()]))
"""

DOORS = {"compile": "torch.compile, artefacts", "plan": "fp.compile, a plan file"}


def _run(folder: Path, model: str, door: str, which: str) -> tuple[float, float, str]:
    with tempfile.TemporaryDirectory() as store:
        command = [sys.executable, "-W", "ignore", "-c", PROCESS, str(folder), model, door, which]
        environment = {**os.environ, "FMTPROP_CACHE_DIR": store}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{model}, {door}, {which} process: {done.stderr[-2000:]}")
    imports, seconds, digest = json.loads(done.stdout.splitlines()[-1])
    return imports, seconds, digest


def measured(model: str, rounds: int, folder: Path) -> None:
    """Run both processes by both doors in turns, compare their answers, and print a row for each door."""
    times: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for door in DOORS:
            digests = set()
            for which in ("first", "second"):
                imports, seconds, digest = _run(folder, model, door, which)
                times.setdefault((door, which), []).append((imports, seconds))
                digests.add(digest)
            if len(digests) > 1:
                raise SystemExit(f"{model}, {door}: the second process gives other bits")
    for door, title in DOORS.items():
        imports = median(one for which in ("first", "second") for one, _ in times[door, which])
        first, second = (median(seconds for _, seconds in times[door, which]) for which in ("first", "second"))
        alone, whole = second / first, (imports + second) / (imports + first)
        print(
            f"| {model} | {title} | {imports:.2f} | {first:.2f} | {second:.2f} | {alone:.2f} | {whole:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["bert", "gpt2", "llama"])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(
        "| model | door | import, s | first process, s | second, s | ratio | with imports |", "|" + "---|" * 7, sep="\n"
    )
    with tempfile.TemporaryDirectory() as temporary:
        for one in given.models:
            measured(one, given.rounds, Path(temporary))
