import os
import subprocess
import sys
import warnings

import pytest

from hyperslab.testing.messages import current_filters, install_filters, load_module, refer_to


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
    typed = "from hyperslab.testing.messages import refer_to\ndef f(): pass\nrefer_to(f)"
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


def warned(category, text):
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn(text, category, stacklevel=1)
    return len(caught)


def test_filters_come_back_in_their_order():
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", "a.c", UserWarning)
        taken = current_filters()
        warnings.resetwarnings()
        install_filters(taken)
        assert current_filters() == taken
        assert warned(UserWarning, "abc") == 0
        with pytest.raises(UserWarning, match="other"):
            warnings.warn("other", UserWarning, stacklevel=1)


def test_a_filter_for_warnings_that_are_not_loaded_is_left_out(monkeypatch):
    class Unseen(UserWarning):
        pass

    monkeypatch.setattr(Unseen, "__module__", "not.loaded")
    with warnings.catch_warnings():
        warnings.simplefilter("error", Unseen)
        install_filters(current_filters())
        assert all(each.category_module != "not.loaded" for each in current_filters())
