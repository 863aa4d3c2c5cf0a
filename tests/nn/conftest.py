import pytest

from hyperslab.testing.strategies import Place

PLACES = [
    Place({}),
    Place({"depth": 3}, {"depth": [0, 5, 5, 11]}),
    Place({"sample": 2, "width": 2}, {"width": [0, 3, 10]}),
]
MORE_PLACES = [
    Place({"channel": 3}),
    Place({"depth": 2}, {"depth": [0, 1, 11]}),
    Place({"sample": 2}, {"sample": [0, 0, 3]}),
    Place({"height": 2, "width": 2}, {"height": [0, 8, 9]}),
    Place({"channel": 2}),
    Place({"channel": 2, "depth": 2}),
    Place({"sample": 2, "channel": 2}),
    Place({"channel": 2, "height": 2, "width": 2}),
]
"""For tensors of 3 samples, 4 channels and spatial extents of 11, 9 and 10."""


@pytest.fixture(params=PLACES, ids=str)
def place_of_whole_channels(request):
    """For what is refused along a split dim."""
    return request.param


@pytest.fixture(
    params=[*PLACES, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE_PLACES)],
    ids=str,
)
def place(request):
    return request.param
