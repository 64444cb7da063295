from __future__ import annotations

import pytest

from fmtprop import builtin
from fmtprop.errors import GraphError


@pytest.fixture
def folders(tmp_path, monkeypatch):
    inside, top = tmp_path / "package", tmp_path / "graphs"
    for folder, names in ((inside, ["resnet50", "vgg16"]), (top, ["resnet50", "unet"])):
        folder.mkdir()
        for name in names:
            (folder / f"{name}.json").write_text("{}")
    monkeypatch.setattr(builtin, "FOLDERS", (inside, top))
    return inside, top


def test_both_folders_are_searched_and_the_package_wins(folders):
    inside, top = folders
    assert builtin.builtin_names() == ["resnet50", "unet", "vgg16"]
    assert builtin.builtin_path("resnet50") == inside / "resnet50.json"
    assert builtin.builtin_path("unet") == top / "unet.json"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet5", "no built-in graph is named 'resnet5'; did you mean resnet50?"),
        ("bert", "no built-in graph is named 'bert'; there are resnet50, unet, vgg16"),
        ("../graphs/unet", "no built-in graph is named '../graphs/unet'; "),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(folders, name, message):
    with pytest.raises(GraphError) as caught:
        builtin.builtin_path(name)
    assert message in str(caught.value)


def test_no_folder_no_names(tmp_path, monkeypatch):
    monkeypatch.setattr(builtin, "FOLDERS", (tmp_path / "nowhere",))
    with pytest.raises(GraphError, match="no built-in graph is named 'unet'; there are none"):
        builtin.builtin_path("unet")
