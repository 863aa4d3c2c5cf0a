"""Memory of networks small enough to count by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from hyperslab.layout import Window
from hyperslab.planner.memory import gradients_by_layer, lbann_memory, step_memory
from hyperslab.planner.network import INPUT, Layer, Network
from hyperslab.planner.shards import Cut, Shards
from hyperslab.planner.workspace import conv_workspace

SAME = (Window(3, 1, 1, 1),) * 2
SAMPLE, FIRST, SECOND = 2 * 8 * 8, 6 * 8 * 8, 4 * 8 * 8
"""Elements of the sample and of two convolutions' outputs."""
LAYERS = (
    Layer("a", "conv2d", "conv", (INPUT,), (6, 8, 8), SAME, num_weights=108, keeps=(INPUT,)),
    Layer("a", "relu", "pointwise", (0,), (6, 8, 8), keeps=(0,), is_in_place=True),
    Layer("b", "conv2d", "conv", (1,), (4, 8, 8), SAME, num_weights=216, keeps=(1,)),
)
NETWORK = Network("two", (2, 8, 8), LAYERS, 324, 2)


def memory(cut=(1, 1, 1, 1, 1), batch=1, precision="fp32", optimizer="adam", **options):
    shards = Shards(NETWORK, Cut(cut), batch)
    options = {"fuses": False} | options
    return step_memory(shards, precision=precision, optimizer=optimizer, **options)


def test_two_convolutions_by_hand():
    found = memory()
    assert found.weights == 324 * 4
    assert found.optimizer == 324 * 8
    # As the first one's gradient is made: the sample, what it keeps, and gradients before and
    # after the activation, although that is in place. Weights of the second have theirs by then.
    assert found.activations == 4 * (SAMPLE + FIRST + FIRST + FIRST)
    assert found.gradients == 216 * 4
    assert found.halos == 0
    assert found.total == sum(
        (found.weights, found.gradients, found.optimizer, found.activations, found.halos)
    )


def test_bfloat16_halves_activations_and_copies_weights():
    assert memory(precision="bf16").activations == memory().activations / 2
    assert memory(precision="bf16").weights == 324 * (4 + 2)


def test_when_activations_are_small_the_end_of_a_pass_takes_most():
    """All gradients are there, and messages with all of them, where ranks average them."""
    layers = [replace(LAYERS[0], num_weights=10**6), replace(LAYERS[2], num_weights=10**7)]
    network = Network("wide", (2, 8, 8), (layers[0], LAYERS[1], layers[1]), 11 * 10**6, 2)

    def gradients(*cut):
        shards = Shards(network, Cut(cut), 2)
        return step_memory(shards, precision="fp32", optimizer="sgd", fuses=False).gradients

    assert gradients(1, 1, 1, 1, 1) == 4 * 11 * 10**6
    assert gradients(2, 1, 1, 1, 1) == 2 * 4 * 11 * 10**6
    assert gradients(2, 2, 1, 1, 1) == 4 * 11 * 10**6
    assert gradients(1, 2, 1, 1, 1) == 2 * 11 * 10**6


def test_an_optimizer_works_with_copies_of_what_it_changes():
    """Of all weights at once, on CPUs of the largest two at a time."""
    layers = [replace(LAYERS[0], num_weights=10**6), replace(LAYERS[2], num_weights=10**7)]
    network = Network("wide", (2, 8, 8), (layers[0], LAYERS[1], layers[1]), 11 * 10**6, 2)
    options = {"precision": "fp32", "optimizer": "adam", "fuses": False}
    shards = Shards(network, Cut((1,) * 5), 1)
    assert step_memory(shards, **options).gradients == 4 * (11 + 11) * 10**6
    assert step_memory(shards, **options, on_cpu=True).gradients == 4 * (11 + 2 * 10) * 10**6


def test_full_messages_of_gradients_exist_while_the_pass_goes_on():
    layers = [replace(LAYERS[0], num_weights=10**6), replace(LAYERS[2], num_weights=10**7)]
    network = Network("wide", (2, 8, 8), tuple(layers), 11 * 10**6, 2)
    found = gradients_by_layer(Shards(network, Cut((2, 1, 1, 1, 1)), 2))
    assert found == [4 * 22 * 10**6, 4 * 20 * 10**6]


def test_ranks_that_keep_filters_keep_the_channels_of_others_too():
    wide = replace(LAYERS[2], inputs=(0,), keeps=(0,), shape=(8, 8, 8))
    network = Network("", (2, 8, 8), (LAYERS[0], wide), 324, 2)

    def activations(num):
        shards = Shards(network, Cut((1, num, 1, 1, 1)), 1)
        return step_memory(shards, precision="fp32", optimizer="sgd", fuses=False).activations

    # Own channels of all tensors, and the others of the second one's input: kept, and coming.
    assert activations(2) == activations(1) / 2 + 4 * (SAMPLE / 2 + FIRST / 2 + FIRST / 2)


def test_on_cpus_convolutions_copy_into_blocks_of_channels():
    few = memory()
    assert memory(on_cpu=True).activations > few.activations
    shards = Shards(NETWORK, Cut((1,) * 5), 2)
    pixels = 2 * 8 * 8
    assert conv_workspace(shards, 0) == 16 * pixels  # the sample's two channels stay as they are
    assert conv_workspace(shards, 2) == (16 + 16) * pixels
    assert conv_workspace(shards, 1) == 0  # an activation
    one = Shards(NETWORK, Cut((1,) * 5), 1)
    assert conv_workspace(one, 2) == 9 * 6 * 8 * 8  # each output's window, written out


@pytest.mark.parametrize(("optimizer", "states"), [("sgd", 0), ("momentum", 1), ("adamw", 2)])
def test_what_an_optimizer_keeps(optimizer, states):
    assert memory(optimizer=optimizer).optimizer == 324 * 4 * states


def test_of_a_recomputed_module_the_input_is_kept():
    pool = (Window(2, 2, 0, 1),) * 2
    pooled, wide = 6 * 4 * 4, 40 * 4 * 4
    layers = (
        LAYERS[0],
        Layer("a", "avg_pool2d", "pool", (0,), (6, 4, 4), pool, keeps=(0,)),
        Layer("b", "conv2d", "conv", (1,), (40, 4, 4), SAME, keeps=(1,)),
    )
    shards = Shards(Network("", (2, 8, 8), layers, 0), Cut((1,) * 5), 1)

    def activations(*recomputed):
        options = {"precision": "fp32", "optimizer": "sgd", "fuses": False}
        return step_memory(shards, **options, recomputed=recomputed).activations / 4

    assert activations() == SAMPLE + FIRST + pooled + (pooled + wide)
    # Its first output is there only while it runs, beside what the pool reads and makes.
    assert activations("a") == SAMPLE + FIRST + (FIRST + pooled)
    # The second one's input is kept anyway, once.
    assert activations("b") == activations()


def test_halos_of_the_layer_that_fetches_most():
    split = memory((1, 1, 1, 4, 1), batch=8)
    rows = 2 * 8  # above and below, the whole width
    assert split.halos == 5 * 4 * 6 * rows * 8
    # At the second convolution: what there is on one rank, and the halos of both.
    whole, kept = 8 * (SAMPLE + FIRST + FIRST + SECOND), 8 * (2 + 6) * rows
    assert split.activations == 4 * (whole / 4 + kept)


def test_samples_and_channels_are_shared():
    assert memory((2, 1, 1, 1, 1), batch=4).activations == 2 * memory().activations
    assert memory((1, 2, 1, 1, 1)).weights == memory().weights / 2


@given(st.integers(1, 8), st.integers(0, 3), st.sampled_from(["fp32", "bf16"]))
def test_more_ranks_never_need_more_each(batch, power, precision):
    for axis in (0, 3, 4):
        cuts = [[1] * 5, [1] * 5]
        cuts[0][axis], cuts[1][axis] = 2**power, 2 ** (power + 1)
        if cuts[1][axis] <= 8:
            few, many = (memory(tuple(each), batch, precision) for each in cuts)
            assert many.activations <= few.activations


def test_lbann_counts_outputs_and_gradients_in_float32():
    assert lbann_memory(NETWORK) == 2 * 4 * (2 * SAMPLE + FIRST + FIRST + SECOND)


def test_lbann_counts_no_views():
    flat = Layer("c", "flatten", "view", (2,), (SECOND,), is_in_place=True)
    assert lbann_memory(Network("", (2, 8, 8), (*LAYERS, flat), 0)) == lbann_memory(NETWORK)
