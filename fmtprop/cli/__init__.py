"""The command line: parses, calls, prints. Other rooms do the work of the commands.

Nothing heavy is imported before a command runs: ``fmtprop --help`` loads neither torch nor oneDNN.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and end the process.

    0: fine, 1: a check failed or a run went wrong, 2: a bad argument or model, 130: interrupted.
    """
    try:
        from fmtprop.cli import app

        app.main(arguments)
    except KeyboardInterrupt:  # a command answers it by itself, but not the imports before it
        raise SystemExit(130) from None
