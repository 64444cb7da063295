"""The documents name only what exists: public names, commands, files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fmtprop

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("graphs/*.md")]
)


def read(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def is_public(path: str) -> bool:
    """Say whether ``.directml.packed_strides`` is reached through the public names."""
    first, *rest = path.strip(".").split(".")
    if first not in fmtprop.__all__:
        return False
    value = getattr(fmtprop, first)
    for name in rest:
        value = getattr(value, name, None)
    return value is not None


@pytest.mark.parametrize("document", DOCUMENTS)
def test_public_names_exist(document: str) -> None:
    named = set(re.findall(r"\bfp((?:\.\w+)+)", read(document)))
    assert {path for path in named if not is_public(path)} == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_exist(document: str) -> None:
    paths = re.findall(r"`((?:fmtprop|tests|scripts|docs|graphs|benchmarks)/[\w./-]*\w\.\w+)`", read(document))
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", read("Makefile"), re.MULTILINE))
    total = set()
    for document in DOCUMENTS:
        text = "\n".join(re.findall(r"`+[^`]*`+|^\$ .*$", read(document), re.MULTILINE))
        named = set(re.findall(r"\bmake ([a-z]+)", text))
        assert named <= targets, f"{document} names make targets that do not exist: {named - targets}"
        total |= named
    assert "test" in total


def test_the_documented_layers_are_the_contract() -> None:
    listed = read("pyproject.toml").partition("\nlayers = [")[2].partition("]")[0]
    contract = re.findall(r'"\(?([^")]+)\)?"', listed)
    section = read("docs/architecture.md").partition("## Who may import whom")[2]
    assert ["__main__", *re.split(r"\s+→\s+", section.split("```")[1].strip())] == contract


def test_make_installs_extras_that_exist() -> None:
    """With one that does not, pip only warns."""
    extras = read("pyproject.toml").partition("[project.optional-dependencies]")[2].partition("[project.scripts]")[0]
    declared = set(re.findall(r"^(\w+) = \[", extras, re.MULTILINE))
    named = set(re.findall(r"\.installed-(\w+)", read("Makefile"))) | set(re.findall(r"fmtprop\[(\w+)\]", extras))
    assert {"dev", "bench", "models"} <= declared
    assert named <= declared


def test_pipeline_runs_the_documented_test_command() -> None:
    commands = [line for line in read(".ci/run").splitlines() if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["make test"]


def test_every_dependency_is_pinned() -> None:
    pinned = {re.split(r"[=;]", line)[0].strip().lower() for line in read("constraints.txt").splitlines()}
    text = read("pyproject.toml").partition("[project.scripts]")[0].partition("dependencies = [")[2]
    named = {name.lower() for name in re.findall(r'"([A-Za-z][\w-]*)(?:\[\w+\])?>=', text)}
    assert {"torch", "numpy", "ruff", "transformers"} <= named
    assert named - pinned == set()


def test_documented_commands_exist() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "fmtprop", "--help"], check=True, capture_output=True, text=True, timeout=120, cwd=ROOT
    ).stdout
    commands = set(re.findall(r"^  ([a-z]+)  ", shown.partition("Commands:")[2], re.MULTILINE))
    assert {"run", "report", "show", "bench", "doctor"} <= commands
    for document in DOCUMENTS:
        named = set(re.findall(r"(?:^\$ |`)fmtprop ([a-z]+)", read(document), re.MULTILINE))
        assert named <= commands, f"{document} names commands that do not exist: {named - commands}"
