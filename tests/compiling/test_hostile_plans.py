"""Damaged and hostile plan files: each is refused with one error, or gives right results; none ends the process."""

import json
import random
import warnings

import pytest
import torch

import fmtprop as fp
from fmtprop.errors import FmtpropError
from fmtprop.planfile.container import Container, parts

#: seeded mutations of each kind in the default suite, and in the slow test
_FEW, _MANY = 40, 1000


@pytest.fixture(scope="module")
def plan():
    """The bytes of a plan file, its model, and an input."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3), torch.nn.Flatten(),
        torch.nn.Linear(16 * 36, 10), torch.nn.Softmax(-1),
    ).eval()  # fmt: skip
    x = torch.randn(2, 3, 8, 8)
    net = fp.compile(module, x, deterministic=True)
    return bytes(net.__reduce__()[1][0]), net(x), x


def outcome(data, x):
    """Return the result of a file's model, or None if it is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return fp.load_plan(data)(x)
        except FmtpropError as error:
            assert len(str(error)) < 5000
            return None


def damaged(data, draw):
    """Return a file with bytes changed, removed, doubled or swapped."""
    made, kind = bytearray(data), draw.randrange(5)
    place = draw.randrange(len(made)) if draw.random() < 0.5 else draw.randrange(min(len(made), 20000))
    if kind == 0:
        made[place] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del made[place:]
    elif kind == 2:
        del made[place : place + draw.choice((1, 8, 64, 4096))]
    elif kind == 3:
        made[place:place] = made[place : place + draw.choice((1, 64, 4096))]
    else:
        other, size = draw.randrange(len(made)), draw.choice((8, 64, 512))
        first, second = made[place : place + size], made[other : other + size]
        if len(first) == len(second) == size and abs(place - other) >= size:
            made[place : place + size], made[other : other + size] = second, first
    return bytes(made)


def leaves(item, path=()):
    """Yield the paths of all values of a document."""
    yield path
    pairs = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
    for key, part in pairs:
        yield from leaves(part, (*path, key))


VALUES = (None, -1, 0, 1, 2**31, 2**62, 2**64 - 1, 1.5, "", "any", "abcd", "aBcd16b", "x", [], {}, [0], True, "ref:any")


def edited(document, draw, paths):
    """Return a document with a value replaced, removed, or moved to another place."""
    made = json.loads(json.dumps(document))
    for _ in range(draw.choice((1, 1, 2))):
        path, other = draw.choice(paths), draw.choice(paths)
        if not path:
            continue
        try:
            owner, source = made, made
            for key in path[:-1]:
                owner = owner[key]
            for key in other:
                source = source[key]
            kind = draw.randrange(4)
            if kind == 0:
                del owner[path[-1]]
            elif kind == 1:
                owner[path[-1]] = json.loads(json.dumps(source))
            elif kind == 2 and isinstance(owner[path[-1]], int):
                owner[path[-1]] += draw.choice((-1, 1, 7, 64))
            else:
                owner[path[-1]] = draw.choice(VALUES)
        except (KeyError, IndexError, TypeError):
            continue
    return made


def check_damage(plan, seeds):
    data, expected, x = plan
    for seed in seeds:
        result = outcome(damaged(data, random.Random(seed)), x)
        assert result is None or torch.equal(result, expected), f"seed {seed}"


def check_edits(plan, seeds):
    """A document that was written anew, with its digest, by somebody hostile."""
    data, _, x = plan
    container = Container(memoryview(bytearray(data)), None)
    document = container.document
    document["options"]["verify"] = "off"
    paths = [path for path in leaves(document) if path[:1] != ("environment",)]
    for seed in seeds:
        made = edited(document, random.Random(seed), paths)
        outcome(b"".join(parts(made, container.blocks)), x)


def swapped(container, draw):
    """Return a file whose weights were moved: forms, blocks or checksums in each other's places."""
    document, blocks = json.loads(json.dumps(container.document)), list(container.blocks)
    forms = document["plans"][0]["forms"]
    for _ in range(draw.choice((1, 1, 2, 3))):
        kind, (i, j) = draw.randrange(4), (draw.randrange(len(forms)), draw.randrange(len(forms)))
        if kind == 0:
            field = draw.randrange(3)
            forms[i][field], forms[j][field] = forms[j][field], forms[i][field]
        elif kind == 1:
            forms[i], forms[j] = forms[j], forms[i]
        elif kind == 2:
            i, j = draw.randrange(len(blocks)), draw.randrange(len(blocks))
            blocks[i], blocks[j] = blocks[j], blocks[i]
        else:
            sums = document["checksums"]
            i, j = draw.randrange(len(sums)), draw.randrange(len(sums))
            sums[i], sums[j] = sums[j], sums[i]
    is_same = all(torch.equal(one, other) for one, other in zip(blocks, container.blocks, strict=True))
    is_honest = is_same and sorted(forms) == sorted(container.document["plans"][0]["forms"])
    return b"".join(parts(document, blocks)), is_honest


def check_swaps(plan, seeds):
    """Weights that are not where the document says are refused; an honest one in another order is right."""
    data, expected, x = plan
    container = Container(memoryview(bytearray(data)), None)
    for seed in seeds:
        made, is_honest = swapped(container, random.Random(seed))
        result = outcome(made, x)
        if is_honest:
            assert result is None or torch.equal(result, expected), f"seed {seed}"


def test_damaged_files_are_refused_or_right(plan):
    check_damage(plan, range(_FEW))


def test_hostile_files_end_no_process(plan):
    check_edits(plan, range(_FEW))


def test_moved_weights_end_no_process(plan):
    check_swaps(plan, range(_FEW))


@pytest.mark.slow
@pytest.mark.parametrize("check", [check_damage, check_edits, check_swaps])
def test_many_mutations(plan, check):
    check(plan, range(_MANY))


def test_swapped_weights_are_refused(plan):
    """Blocks of one size in each other's places."""
    data, *_ = plan
    container = Container(memoryview(bytearray(data)), None)
    blocks = list(container.blocks)
    for i, first in enumerate(blocks):
        for j, second in enumerate(blocks):
            if i < j and first.numel() == second.numel() and not torch.equal(first, second):
                blocks[i], blocks[j] = second, first
                with pytest.raises(FmtpropError, match=r"is damaged: block \d+ of its weights"):
                    fp.load_plan(b"".join(parts(container.document, blocks)))
                return
    blocks[0] = blocks[0] + 1
    with pytest.raises(FmtpropError, match="is damaged: block 0 of its weights"):
        fp.load_plan(b"".join(parts(container.document, blocks)))


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(300), marks=pytest.mark.slow)])
def test_hostile_programs_end_no_process(seeds):
    """A file for several shapes, edited where its program, shapes and buckets are; a new shape opens the program."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
    net = fp.compile(module, torch.randn(3, 8), dynamic_shapes=({0: torch.export.Dim("n", max=9)},), deterministic=True)
    container = Container(memoryview(bytearray(net.__reduce__()[1][0])), None)
    own = ("program", "max_shapes", "buckets")
    paths = [path for path in leaves(container.document) if path[:1] and path[0] in own]
    for seed in seeds:
        data = b"".join(parts(edited(container.document, random.Random(seed), paths), container.blocks))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                again = fp.load_plan(data)
                for rows in (3, 5):
                    assert again(torch.ones(rows, 8)).shape == (rows, 4)
            except FmtpropError:
                pass
