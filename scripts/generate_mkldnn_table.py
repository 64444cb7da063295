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
from fmtprop.targets.mkldnn.capability import capability_table

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "mkldnn.md"
BEGIN, END = "<!-- begin generated table -->", "<!-- end generated table -->"


def updated(text: str) -> str:
    """Return the document with the table of the installed PyTorch."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    version = torch.__version__.partition("+")[0]
    return f"{before}{BEGIN}\nPyTorch {version}:\n\n{capability_table()}\n{END}{after}"


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
