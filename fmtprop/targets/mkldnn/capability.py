"""Table of the ops that the installed PyTorch can run on its own oneDNN, from its dispatcher's answers."""

from __future__ import annotations

from fmtprop.ir.op import OPSET
from fmtprop.targets.mkldnn.dispatcher import accepts_unary, has_kernel
from fmtprop.targets.mkldnn.fused import FUSED
from fmtprop.targets.mkldnn.opaque import RULES
from fmtprop.targets.mkldnn.tail import UNARIES


def capability_table() -> str:
    """Return the table in Markdown: for each op with a primitive, the operators with a kernel for it.

    >>> print(capability_table().splitlines()[0])
    | op | fused, dense or channels-last | on opaque tensors | only on dense tensors |
    """
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
