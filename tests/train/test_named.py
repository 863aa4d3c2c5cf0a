import sys
from pathlib import Path

import pytest

from hyperslab.errors import ConfigError
from hyperslab.train.named import find_named


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def error_of(text):
    with pytest.raises(ConfigError) as caught:
        find_named(text, "model.name")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_modules_and_what_is_inside_their_classes():
    assert find_named("collections:OrderedDict", "model.name").__name__ == "OrderedDict"
    assert find_named("pathlib:Path.cwd", "model.name")() == Path.cwd()


def test_modules_of_the_current_folder(folder):
    (folder / "made_up_nets.py").write_text("class Net: pass")
    assert find_named("made_up_nets:Net", "model.name").__name__ == "Net"


def test_a_file_is_loaded_once_and_finds_its_neighbours(folder, monkeypatch):
    (folder / "sub").mkdir()
    (folder / "sub" / "made_up_layers.py").write_text("width = 3")
    code = "from made_up_layers import width\nclass Net: size = width\ndef loss(): return Net"
    (folder / "sub" / "json.py").write_text(code)
    net = find_named("sub/json.py:Net", "model.name")
    assert net.size == 3
    monkeypatch.chdir(folder / "sub")
    assert find_named("json.py:loss", "task.loss")() is net
    assert sys.modules["json"].dumps


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("net", "model.name = 'net' is not understood: write module:Name"),
        (":Net", "is not understood"),
        ("nets.py:", "is not understood"),
        ("nowhere.py:Net", "there is no file"),
        ("no_such_module:Net", "there is no module no_such_module"),
        ("json.no_such:Net", "there is no module json.no_such"),
        ("good.py:Nett", "good.py has no Nett: did you mean 'Net'?"),
        ("good.py:Net.inner", "good.py has no Net.inner"),
        ("good.py:size.x", "good.py has no size.x"),
        ("..:Net", ".. cannot be imported: "),
        ("good.py:size", "is int, neither a class nor a function"),
        (
            "needs.py:Net",
            "needs.py cannot be imported: ModuleNotFoundError: No module named 'torc'",
        ),
        ("fails.py:Net", "fails.py cannot be imported: ZeroDivisionError: division by zero"),
        ("fails.py:Net", "(fails.py, line 2)"),
        ("wrong.py:Net", "wrong.py cannot be imported: SyntaxError: "),
        ("exits.py:Net", "exits.py cannot be imported: SystemExit: 3"),
    ],
)
def test_what_cannot_be_found_is_told_in_a_line(folder, text, words):
    (folder / "good.py").write_text("class Net: pass\nsize = 3")
    (folder / "needs.py").write_text("import torc")
    (folder / "fails.py").write_text("a = 0\nb = 1 / a")
    (folder / "wrong.py").write_text("class Net(:")
    (folder / "exits.py").write_text("raise SystemExit(3)")
    assert words in error_of(text)
