import os
import subprocess
import sys

import pytest

from hyperslab.testing.function_ref import load_module, refer_to


class Holder:
    @staticmethod
    def method():
        return "held"


def plain():
    return "plain"


def test_a_reference_leads_back_to_the_function():
    for function in (plain, Holder.method, os.getpid, os.path.join):
        assert refer_to(function).load() is function


NAMELESS = {"lambda": lambda: 0, "method": Holder().__str__, "wrapper": print.__call__, "number": 3}


@pytest.mark.parametrize("function", NAMELESS.values(), ids=NAMELESS)
def test_what_has_no_place_in_a_module_is_refused(function):
    with pytest.raises(TypeError, match="pass a function from the top level of a module"):
        refer_to(function)


def test_a_function_typed_at_a_prompt_is_refused():
    typed = "from hyperslab.testing.function_ref import refer_to\ndef f(): pass\nrefer_to(f)"
    command = [sys.executable, "-c", typed]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "TypeError: ranks cannot find f: write it to a file" in done.stderr


def test_files_that_cannot_be_imported_by_name_can_import_each_other(tmp_path, monkeypatch):
    folder = tmp_path / "some_tests" / "part"
    folder.mkdir(parents=True)
    (folder / "helper.py").write_text("ANSWER = 42\n")
    (folder / "test_it.py").write_text(
        "from .helper import ANSWER\nfrom some_tests.part import helper\n"
    )
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    module = load_module("some_tests.part.test_it", str(folder / "test_it.py"))
    assert module.ANSWER == module.helper.ANSWER == 42
    assert sys.modules["some_tests.part.test_it"] is module
