"""What the documents show of the command line is what it prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.command import ROOT, fmtprop, start

DOCUMENTS = ["README.md", "docs/tutorial.md", "docs/report.md", "docs/verbose.md"]


def examples(document: str) -> list[tuple[list[str], str]]:
    """Return every ``$ fmtprop`` of a document's console blocks: its words, and the output below it."""
    found: list[tuple[list[str], str]] = []
    for block in re.findall(r"```console\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, output = part.partition("\n")
            words = shlex.split(re.split(r"[|#>]", line)[0])
            if words and words[0] == "fmtprop":
                found.append((words[1:], output.strip("\n")))
    return found


ALL = [example for document in DOCUMENTS for example in examples(document)]


def test_there_are_examples_of_the_main_commands():
    assert {words[0] for words, _ in ALL} >= {"run", "report", "show", "bench", "models", "layout", "doctor", "verbose"}


@pytest.mark.parametrize("words", [words for words, _ in ALL], ids=" ".join)
def test_every_example_is_a_command_with_options_that_exist(capsys, words):
    code, out, _ = fmtprop(capsys, words[0], "--help")
    assert code == 0
    options = {word for word in words if word.startswith("-")}
    assert {option for option in options if not re.search(rf"(^|[\s,]){option}\b", out)} == set()


SHOWN = [pair for pair in ALL if pair[1] and pair[0][0] in ("layout", "verbose")]


@pytest.mark.parametrize(("words", "shown"), SHOWN, ids=lambda value: str(value)[:30])
def test_shown_output(capsys, monkeypatch, words, shown):
    monkeypatch.chdir(ROOT)
    assert fmtprop(capsys, *words).out.strip() == shown


@pytest.mark.slow
def test_shown_summary_of_resnet50(tmp_path: Path):
    ((words, shown),) = [pair for pair in ALL if pair[1] and pair[0][0] == "run"]
    process = start(*words, "-n", 1, environment={"ONEDNN_MAX_CPU_ISA": "AVX2", "FMTPROP_CACHE_DIR": str(tmp_path)})
    out, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (0, "")
    assert shown in out
