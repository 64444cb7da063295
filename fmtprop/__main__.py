"""``python -m fmtprop`` is ``fmtprop``."""

from __future__ import annotations

from fmtprop.cli import main

if __name__ == "__main__":
    main()
