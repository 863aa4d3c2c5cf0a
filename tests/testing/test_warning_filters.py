import warnings

import pytest

from hyperslab.testing.warning_filters import current_filters, install_filters


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
