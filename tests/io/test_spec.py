import itertools

import numpy as np
import pytest

from hyperslab.errors import ConfigError
from hyperslab.io.spec import axes_of
from hyperslab.layout import Box

ORDERS = ["".join(order) for n in range(1, 5) for order in itertools.permutations("CDHW", n)]


@pytest.mark.parametrize("letters", ORDERS)
def test_any_order_of_dims_becomes_channels_first(letters):
    extents = {"C": 2, "D": 3, "H": 4, "W": 5}
    array = np.arange(np.prod([extents[a] for a in letters])).reshape([extents[a] for a in letters])
    axes = axes_of(letters, len(letters), "it")
    names = [letter for letter in "CDHW" if letter in letters]
    want = np.einsum(f"{letters}->{''.join(names)}", array)
    assert axes.sample_shape(array.shape) == want.shape
    box = Box.of(*[(1, extent) for extent in want.shape])
    out = np.empty(box.shape, array.dtype)
    inside = axes.file_box(0, box)
    axes.file_view(out)[...] = array[tuple(slice(*span) for span in inside.spans)]
    np.testing.assert_array_equal(out, want[tuple(slice(1, None) for _ in want.shape)])


def test_an_n_in_front_means_many_samples():
    axes = axes_of("nchw", 4, "it")
    assert axes.stacked
    assert axes.num_samples((7, 3, 4, 5)) == 7
    assert axes.sample_shape((7, 3, 4, 5)) == (3, 4, 5)


@pytest.mark.parametrize("letters", ["XYZ", "CHH", "N", "", "CHNW", "HWN"])
def test_letters_that_name_no_dims_are_refused(letters):
    with pytest.raises(ConfigError, match="name each dim by one of the letters C, D, H, W"):
        axes_of(letters, 3, "array 'x'")


def test_a_wrong_number_of_letters_is_refused():
    with pytest.raises(ConfigError, match=r"axes 'HW' name 2 dims, but array 'x' has 4"):
        axes_of("HW", 4, "array 'x'")
    with pytest.raises(ConfigError, match=r"has 4: give a letter a dim, such as 'NCHW' if its"):
        axes_of("CHW", 4, "array 'x'")
