import pytest
import torch

from hyperslab.errors import ConfigError
from hyperslab.models import DenseAutoencoder, describe


def test_an_autoencoder_maps_an_image_to_a_wide_layer_and_back():
    with torch.device("meta"):
        found = describe(DenseAutoencoder(hidden=[50_000]), (3, 256, 256))
    assert found.num_parameters == 2 * 196_608 * 50_000 + 196_608 + 50_000
    assert found.forward_flops == 2 * 2 * 196_608 * 50_000
    assert found.output_shape == (3, 256, 256)


def test_several_widths_are_a_mirrored_stack():
    model = DenseAutoencoder(inputs=24, hidden=[12, 5])
    shapes = [tuple(w.shape) for w in model.parameters() if w.ndim == 2]
    assert shapes == [(12, 24), (5, 12), (12, 5), (24, 12)]
    assert model(torch.rand(3, 2, 4, 3)).shape == (3, 2, 4, 3)


def test_sigmoid_keeps_the_output_between_0_and_1():
    torch.manual_seed(0)
    x = torch.randn(4, 1, 6, 5) * 100
    assert DenseAutoencoder(30, [7])(x).min() < 0
    assert DenseAutoencoder(30, [7], output="sigmoid")(x).min() >= 0


def test_samples_with_other_numbers_are_refused():
    with pytest.raises(ConfigError, match="30 numbers and is given 1x4x5: set inputs = 20"):
        DenseAutoencoder(30, [7])(torch.zeros(2, 1, 4, 5))


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="hidden must be one or more numbers"):
        DenseAutoencoder(30, [])
    with pytest.raises(ConfigError, match="output must be one of linear, sigmoid, got 'tanh'"):
        DenseAutoencoder(30, [7], output="tanh")
