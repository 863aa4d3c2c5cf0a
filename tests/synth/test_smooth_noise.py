import numpy as np
import pytest

from hyperslab.synth.smooth_noise import smooth_noise, spline_weights


@pytest.mark.parametrize(("num", "cells"), [(10, 4), (7, 1.5), (5, 20), (1, 1)])
def test_weights_of_a_point_are_those_of_a_cubic_spline(num, cells):
    weights = spline_weights(num, cells)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    places = (np.arange(num) + 0.5) * cells / num
    np.testing.assert_allclose(weights @ (np.arange(weights.shape[1]) - 1), places, rtol=1e-5)
    assert weights.min() >= 0


def test_fields_have_the_spread_of_a_normal_and_are_smooth():
    rng = np.random.default_rng(0)
    field = smooth_noise((200, 300), (50, 60), rng)
    assert field.shape == (200, 300)
    assert field.dtype == np.float32
    assert field.std() == pytest.approx(1, abs=0.05)
    assert np.abs(np.diff(field, axis=1)).mean() < 0.4
