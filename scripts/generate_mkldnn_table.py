"""Write the table of docs/mkldnn.md anew from what the installed PyTorch's dispatcher answers.

``python -m scripts.generate_mkldnn_table`` from the top of a checkout; ``--check`` writes nothing and exits with 1
where the document is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import fmtprop.ops  # noqa: F401 (fills the op set)
from fmtprop.ir import OPSET
from fmtprop.targets.mkldnn.dispatcher import accepts_unary, has_kernel
from fmtprop.targets.mkldnn.fused import FUSED
from fmtprop.targets.mkldnn.opaque import RULES
from fmtprop.targets.mkldnn.tail import UNARIES

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "mkldnn.md"
BEGIN, END = "<!-- begin generated table -->", "<!-- end generated table -->"


def updated(text: str) -> str:
    """Return the document with the table of the installed PyTorch."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    version = torch.__version__.partition("+")[0]
    return f"{before}{BEGIN}\nPyTorch {version}:\n\n{capability_table()}\n{END}{after}"


def capability_table() -> str:
    """Return the table in Markdown: for each op with a primitive, the operators with a kernel for it."""
    lines = [
        "| op | fused, dense or channels-last | on opaque tensors | only on dense tensors |",
        "|---|---|---|---|",
    ]
    for name in sorted(OPSET):
        if OPSET[name].primitive is None:
            continue
        lines.append(f"| {name} | {_fused(name)} | {_opaque(name, True)} | {_opaque(name, False)} |")
    tails = [
        f"| `{unary.attr}`{f' ({unary.algorithm})' if unary.algorithm else ''} | {_yes(unary, False)} "
        f"| {_yes(unary, True)} |"
        for unary in UNARIES
    ]
    return "\n".join(
        [*lines, "", "| post-op | of a convolution | after an addition |", "|---|---|---|", *dict.fromkeys(tails)]
    )


def _fused(op: str) -> str:
    operator, _ = FUSED.get(OPSET[op].attrs, (None, None))
    if op == "reorder":
        return "`aten::copy_`, `aten::to_mkldnn`, `aten::to_dense`"
    if operator is None or not has_kernel(operator, "CPU"):
        return ""
    forms = [form for form in (operator, f"{operator}.binary", f"{operator}_.binary") if has_kernel(form, "CPU")]
    return ", ".join(f"`{form}`" for form in forms)


def _opaque(op: str, available: bool) -> str:
    operators = dict.fromkeys(rule.operator for rule in RULES if rule.op == op and rule.available is available)
    return ", ".join(f"`{operator}`" for operator in operators)


def _yes(unary: object, after_add: bool) -> str:
    attr, scalars, algorithm = (getattr(unary, name) for name in ("attr", "scalars", "algorithm"))
    return "yes" if accepts_unary(attr, scalars, algorithm, after_add=after_add) else "no"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the document would change")
    check = parser.parse_args(arguments).check
    text = DOCUMENT.read_text(encoding="utf-8")
    new = updated(text)
    if check:
        return int(new != text)
    DOCUMENT.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
