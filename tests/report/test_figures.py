"""Every figure that a report shows comes from its JSON, and no two of them contradict each other."""

from __future__ import annotations

import json
import re
from collections import Counter
from decimal import ROUND_HALF_UP, Decimal

import pytest
import torch
from torch import nn

from fmtprop.api import Options
from fmtprop.bench.policies import compare_policies
from fmtprop.capture import from_torch, load
from tests.report.browser import CHROMIUM, browsing
from tests.report.test_precision import mixed

POLICIES = ("plain", "naive", "propagate", "optimal")
FEW = ("concat", "upscaler", "denoiser", "quantized", "summed")
TEN = (
    "bert_base", "conv3d", "convnext_t", "densenet121", "efficientnet_b0", "inception_v3", "mobilenet_v2", "resnet50",
    "shufflenet_v2", "unet", "vit_b16",
)  # fmt: skip
#: a number with a unit
FIGURE = re.compile(r"(?<![\w.:])(\d+(?:\.\d+)?(?:e[-+]?\d+)?) ?(ms|us|µs|s|%|GB/s|[KMG]iB|B)(?![\w/])")


class Upscaler(nn.Module):
    """Has views that must copy, a function without a module, and few steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 5, padding=2), nn.Conv2d(32, 12, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.pixel_shuffle(self.second(torch.tanh(self.first(x))), 2)
        return torch.cat([x, x.flip(1)], 1)


class Denoiser(nn.Module):
    """Has views that must copy before a convolution and behind one, and a normalization that some formats lack."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(12, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32)
        self.up, self.last = nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1), nn.Conv2d(28, 12, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.pixel_unshuffle(x, 2)
        z = self.up(nn.functional.silu(self.norm(self.first(y))))
        return nn.functional.pixel_shuffle(self.last(torch.cat([z, y], 1)), 2) + x


class Summed(nn.Module):
    """PyTorch adds in row-major, between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).cumsum(2))


OWN = {"upscaler": (Upscaler, 24), "denoiser": (Denoiser, 32), "summed": (Summed, 32)}


def compared(name, policies=POLICIES):
    module, size = OWN.get(name, (None, 0))
    if module is not None:
        graph = from_torch(module(), torch.ones(1, 3, size, size))
    else:
        graph = mixed() if name == "quantized" else load(name)
    return compare_policies(graph, [Options(policy=policy, tune="model") for policy in policies], repeats=2)


@pytest.fixture(scope="module", params=[*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in TEN)])
def comparison(request):
    return compared(request.param)


# ---------------------------------------------------------------- what no page may deny


def test_no_two_figures_contradict_each_other(comparison):
    for one in json.loads(comparison.to_json())["policies"]:
        check_shares(one)
        check_answers(one)
        check_choice(one)
        check_words(one)


def check_words(one):
    """What a sentence says of a step is so."""
    bytes_ = ("u8", "s8")
    for step in one["steps"]:
        src, _, dst = step["formats"].partition(" -> ")
        assert ("; in bytes" not in step["reason"]) or step["computes_in"] in bytes_
        assert ("; writes bytes" not in step["reason"]) or (src[:2] not in bytes_ and dst[:2] in bytes_)
        assert ("stays in floats" not in step["reason"]) or step["computes_in"] not in bytes_
        assert ("no implementation here" not in step["reason"]) or one["policy"] == "optimal", (
            "others have other formats"
        )
        assert step["op"] != "aten"
        assert " 0 us more" not in step["reason"]
    calls = {step["name"] for step in one["steps"] if step["op"].startswith("aten.")}
    for row in one["reorders"]:
        sides = {row["producer"], *(reader.partition(".")[0] for reader in row["readers"])}
        if row["cause"] == "missing implementation":
            assert not sides & calls, "a newer oneDNN would not help"
            assert one["policy"] == "optimal" or row["counterfactual"]["verdict"] != "avoidable", "the policy would"
    others = [step for step in one["steps"] if step["impl"] == "torch" and step["name"] not in calls]
    for warning in one["warnings"]:
        assert "policy='optimal' may" not in warning or (one["policy"] != "optimal" and others)


def check_shares(one):
    """All shares are parts of the run, and all sums are of the same rows."""
    run, rows, steps = one["seconds"], one["reorders"], {step["name"]: step for step in one["steps"]}
    assert sum(step["seconds"] for step in one["steps"]) == pytest.approx(run)
    for row in rows:
        assert row["seconds"] == steps[row["name"]]["seconds"] and row["origin"] == steps[row["name"]]["origin"]
        assert row["share"] == pytest.approx(row["seconds"] / run)
        assert row["logical_nbytes"] + row["padding_nbytes"] == row["nbytes"]
        assert row["bytes_per_second"] == pytest.approx(row["nbytes"] / row["seconds"])
    moving, nbytes = sum(row["seconds"] for row in rows), sum(row["nbytes"] for row in rows)
    for sums in one["totals"].values():
        assert sum(total["count"] for total in sums) == len(rows)
        assert sum(total["seconds"] for total in sums) == pytest.approx(moving)
        assert sum(total["nbytes"] for total in sums) == nbytes
    assert sum(module["seconds"] for module in one["modules"]) == pytest.approx(run)
    assert sum(module["reorder_seconds"] for module in one["modules"]) == pytest.approx(moving)
    assert sum(module["nbytes"] for module in one["modules"]) == nbytes
    if rows:
        said = f"{moving / run:.1%} of a run ({exact_time(moving)}) and "
        assert said in one["verdict"][0] and f" {text_bytes(nbytes)}." in one["verdict"][0]
        words = {"pays": "worth", "not solved": "not"}
        counts = {name: int(count) for count, name in re.findall(r"[ ,](\d+) (\w+)", one["verdict"][1])}
        verdicts = Counter(row["counterfactual"]["verdict"] for row in rows)
        assert counts == {words.get(name, name): count for name, count in verdicts.items()}
        costliest = max(rows, key=lambda row: row["seconds"])
        assert f"The costliest one is {costliest['name']}" in one["verdict"][2]
    memory = one["memory"]
    ends = [buffer["offset_nbytes"] + buffer["nbytes"] for buffer in one["buffers"]]
    assert max(ends, default=0) <= memory["arena"]
    if all(step["target"] == "onednn" for step in one["steps"]):  # PyTorch's operators allocate tensors outside of it
        assert memory["peak"] <= memory["arena"]


def check_answers(one):
    """Each verdict on a reorder follows from the differences beside it."""
    for row in one["reorders"]:
        told = row["counterfactual"]
        if told["verdict"] == "forced":
            assert row["cause"] not in ("policy", "cheaper kernel"), "these can change"
        if told["verdict"] in ("forced", "not solved"):
            assert told["why"] and told["difference_seconds"] is None
            continue
        extra, error, own = told["extra_seconds"], told["error_seconds"], told["alone_seconds"]
        assert told["seconds"] - told["plan_seconds"] == pytest.approx(extra, abs=1e-12)
        assert told["costs"] or extra == 0
        if own is not None:  # the best plan may change here alone, too
            assert own >= extra - 1e-9 - 0.01 * abs(extra)
        gains = {"extra": -extra >= error, "own": own is not None and -own >= told["alone_error_seconds"]}
        assert (told["verdict"] == "avoidable") == any(gains.values())
        assert (told["verdict"] == "pays") == (extra >= error and not any(gains.values()))
        assert told["difference_seconds"] in (own, extra)
        if told["verdict"] == "avoidable":
            assert told["difference_seconds"] < 0
        if told["verdict"] == "pays":
            assert told["difference_seconds"] > 0


def check_choice(one):
    """The proof of a plan, the sentence about it, and the answers about its reorders say the same."""
    proof = one["certificate"]
    if proof is None:
        assert one["policy"] != "optimal"
        return
    assert proof["gap"] == pytest.approx(max(0.0, 1 - proof["bound"] / proof["objective"]), abs=1e-6)
    assert 0 <= proof["fallback"] <= proof["objective"] * (1 + 1e-9)
    if proof["is_usual"]:
        assert proof["objective"] == pytest.approx(proof["propagate"], rel=1e-3)
    if one["race"] is not None:
        assert proof["plan"] == one["race"]["names"][one["race"]["winner"]]
    said = " ".join(one["verdict"])
    is_proved = proof["gap"] <= 1e-9
    assert ("is cheaper: proved" in said) == is_proved
    assert (f"at most {proof['gap']:.1%} less" in said) != is_proved
    for row in one["reorders"] if is_proved else ():
        told, slack = row["counterfactual"], 1e-2 * proof["objective"]
        assert told["verdict"] != "avoidable" and (told["extra_seconds"] is None or told["extra_seconds"] >= -slack)
    assert one["costs"] == "modelled", "tune='model'"


# ---------------------------------------------------------------- what the pages show


def test_the_text_has_no_figure_of_its_own(comparison):
    text = comparison.to_text() + comparison.summary()
    known = {word for one in json.loads(comparison.to_json())["policies"] for word in known_words(one, text_time)}
    found = {f"{number} {unit}".replace(" %", "%") for number, unit in FIGURE.findall(text)}
    assert found - known == set() and len(found) > 20


def test_the_page_has_no_figure_of_its_own(comparison, tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    folder = tmp_path_factory.mktemp("page")
    (folder / "page.html").write_text(comparison.to_html(), encoding="utf-8")
    data = json.loads(comparison.to_json())["policies"]
    with browsing(folder) as page:
        page.open(folder / "page.html")
        for index, one in enumerate(data):
            page.value(f"void document.querySelectorAll('#policies button')[{index}].click()")
            if one["reorders"]:
                page.value("void document.querySelector('#rows td button').click()")
            page.settle()
            text = page.value("document.body.innerText")
            known = {word for other in data for word in page_words(other)}
            found = {f"{number} {unit}".replace(" %", "%") for number, unit in FIGURE.findall(text)}
            assert found - known == set() and len(found) > 10
            names, values = (
                page.value(f"[...document.querySelectorAll('#figures {tag}')].map((x) => x.textContent)")
                for tag in ("dt", "dd")
            )
            figures = dict(zip(names, values, strict=True))
            assert figures["a run"] == page_time(one["seconds"]) and figures["reorders"] == str(len(one["reorders"]))
            assert figures["packed once"] == str(len(one["packed"])) and figures["steps"] == str(len(one["steps"]))
            verdicts = [row["counterfactual"]["verdict"] for row in one["reorders"]]
            asked = len(verdicts) - verdicts.count("not solved")
            of = f" of {asked} asked" if asked < len(verdicts) else ""
            assert figures[f"avoidable, {one['costs']}"] == f"{verdicts.count('avoidable')}{of}"
            assert f"{len(one['packed'])} constants were packed once" in text
            if one["certificate"] is not None:
                assert figures[f"above lower bound, {one['costs']}"] == f"{100 * one['certificate']['gap']:.1f} %"


def known_words(one, time):
    """Yield every figure that a page may show: the JSON's numbers in words."""
    rows, run = one["reorders"], one["seconds"]
    moving = sum(row["seconds"] for row in rows)
    proof, race = one["certificate"], one["race"]
    seconds = [run, moving, *(step["seconds"] for step in one["steps"]), *one["compile_seconds"].values()]
    seconds += [total["seconds"] for sums in (*one["totals"].values(), one["precisions"]) for total in sums]
    answers = [row["counterfactual"] for row in rows]
    keys = ("extra_seconds", "error_seconds", "alone_seconds", "alone_error_seconds", "difference_seconds")
    seconds += [abs(told[key]) for told in answers for key in keys if told[key] is not None]
    if proof is not None:
        seconds += [proof[key] for key in ("objective", "bound", "propagate", "seconds", "fallback", "run")]
        yield f"{proof['gap']:.1%}"
        yield f"{proof['gap']:.2%}"
        yield exact_time(proof["objective"] - proof["bound"])
    if race is not None:
        seconds += race["seconds"]
    yield from map(time, seconds)
    yield exact_time(moving)
    yield from (f"{share:.{digits}%}" for share in (moving / run, one["fallback_share"]) for digits in (0, 1))
    yield from (f"{row['share']:.1%}" for row in rows)
    yield from (f"{row['bytes_per_second'] / 1e9:.1f} GB/s" for row in rows)
    sizes = [*one["memory"].values(), sum(row["nbytes"] for row in rows), sum(size for _, _, size in one["packed"])]
    sizes += [row[key] for row in rows for key in ("nbytes", "padding_nbytes", "logical_nbytes")]
    sizes += [total[key] for sums in one["totals"].values() for total in sums for key in ("nbytes", "padding_nbytes")]
    yield from map(text_bytes, sizes)
    yield from re.findall(r"\d+ us", " ".join(step["reason"] for step in one["steps"]))  # as they were chosen


def page_words(one):
    """Yield every figure of the page: JavaScript rounds a half up, Python to the even digit."""
    yield from (word.replace(" us", " µs") for word in known_words(one, text_time))
    yield from known_words(one, page_time)
    proof, rows = one["certificate"], one["reorders"]
    shares = [row[key] for row in rows for key in ("share", "bandwidth_share")]
    yield from (f"{half_up(100 * share, 1)}%" for share in [*shares, proof["gap"] if proof is not None else 0.0])
    yield from (f"{half_up(row['bytes_per_second'] / 1e9, 1)} GB/s" for row in rows)
    sizes = [*one["memory"].values(), sum(row["nbytes"] for row in rows)]
    sizes += [row[key] for row in rows for key in ("nbytes", "padding_nbytes", "logical_nbytes")]
    for size in sizes:
        small = size < 2**20
        yield (
            f"{size} B"
            if size < 1024
            else f"{half_up(size / (1024 if small else 2**20), 1)} {'KiB' if small else 'MiB'}"
        )


def half_up(value, digits):
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def text_time(seconds):
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def page_time(seconds):
    small = abs(seconds) < 1e-3
    return f"{half_up(seconds * 1e6, 1)} µs" if small else f"{half_up(seconds * 1e3, 3)} ms"


def exact_time(seconds):
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3f} ms"


def text_bytes(size):
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
