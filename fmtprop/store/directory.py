"""The directory of measured figures, verdicts and passed checks."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_directory() -> Path:
    """Return the user's cache directory for fmtprop; ``FMTPROP_CACHE_DIR`` overrides it."""
    override = os.environ.get("FMTPROP_CACHE_DIR")
    return Path(override) if override else Path(platformdirs.user_cache_dir("fmtprop"))
