"""The command line: parses, calls, prints. Each command's work is done in the room that it belongs to.

Nothing heavy is imported before a command runs: ``fmtprop --help`` loads neither torch nor oneDNN.
"""

from fmtprop.cli.app import main

__all__ = ["main"]
