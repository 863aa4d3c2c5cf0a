import h5py
import numpy as np
import pytest
from hypothesis import given, strategies as st

import hyperslab as hs
from hyperslab.errors import ConfigError
from hyperslab.io import ArraySpec
from hyperslab.io.spec import axes_of
from hyperslab.layout import Box
from hyperslab.store.augment import Augmentation


def spec_of(shape):
    axes = axes_of("CDHW", 4, "it")
    return ArraySpec("it", axes, shape, np.dtype(int), is_cut=True)


@given(
    st.sampled_from([(2, 4, 4, 4), (1, 3, 5, 3), (3, 2, 3, 4)]),
    st.sampled_from(["flip", "cube"]),
    st.integers(0, 100),
    st.data(),
)
def test_the_pre_image_of_a_box_becomes_that_box(shape, kind, index, data):
    sample = np.arange(np.prod(shape)).reshape(shape)
    symmetry = Augmentation(kind, shape[1:]).symmetry(0, 0, index)
    turned = sample.transpose(0, *(1 + dim for dim in symmetry.order))
    turned = np.flip(turned, [1 + dim for dim, flip in enumerate(symmetry.flips) if flip])
    assert turned.shape == shape
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, extent)] * 2))) for extent in shape]
    box = Box.of(*bounds)
    out = np.full(box.shape, -1)
    source = symmetry.source(box, spec_of(shape))
    symmetry.view(out)[...] = sample[source.slices_in(Box.whole(shape))]
    np.testing.assert_array_equal(out, turned[box.slices_in(Box.whole(shape))])


def test_all_symmetries_of_a_cube_are_drawn_and_change_with_the_epoch():
    augmentation = Augmentation("cube", (8, 8, 8))
    drawn = [augmentation.symmetry(7, epoch, index) for epoch in range(10) for index in range(200)]
    assert len(set(drawn)) == 48
    assert drawn[:200] != drawn[200:400]


def test_extents_that_differ_are_not_permuted():
    augmentation = Augmentation("cube", (4, 8, 4))
    orders = {augmentation.symmetry(0, 0, index).order for index in range(100)}
    assert orders == {(0, 1, 2), (2, 1, 0)}


def test_an_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match="augment must be one of flip, cube or None, got 'spin'"):
        Augmentation("spin", (4,))


@pytest.mark.parametrize("kind", ["flip", "cube"])
def test_a_map_on_another_grid_would_not_be_turned_and_is_refused(tmp_path, kind):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["image"], file["coarse"] = np.zeros((2, 8, 8)), np.zeros((4, 2, 2))
    data = hs.open(tmp_path / "a.h5", sample="image", target="coarse", axes="CHW")
    hs.Loader(data)
    with pytest.raises(ConfigError, match=r"turns the sample, but not 'coarse' of \(4, 2, 2\)"):
        hs.Loader(data, augment=kind)
