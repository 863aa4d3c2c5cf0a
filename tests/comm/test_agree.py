import functools
import threading

import pytest

import hyperslab as hs
from hyperslab.comm.agree import agree, agree_on

init = functools.partial(hs.init, device="cpu", timeout_seconds=100)


class ShortError(ValueError):
    """Cannot be pickled, as errors that hold files or locks cannot."""

    def __init__(self, words):
        super().__init__(words)
        self.lock = threading.Lock()


@pytest.mark.ranks(3)
def test_ranks_that_are_well_go_on():
    agree(None, init(height=3))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("failed", [0, 1, 2])
def test_an_error_on_one_rank_stops_all_and_names_it(failed):
    mesh = init(height=3)
    error = ShortError("sample 7 has 12 rows\nof 16") if mesh.rank == failed else None
    if error:
        with pytest.raises(ShortError, match="12 rows") as caught:
            agree(error, mesh)
        assert caught.value is error
    else:
        words = f"rank {failed} stopped, and so do all: ShortError: sample 7 has 12 rows\nof 16"
        with pytest.raises(hs.CommError, match=words):
            agree(None, mesh)
    agree(None, mesh)  # and nothing of it is left


@pytest.mark.ranks(3)
def test_of_several_errors_the_first_rank_is_named():
    mesh = init(height=3)
    error = ShortError(f"on {mesh.rank}") if mesh.rank else None
    words = "^on 1$" if mesh.rank == 1 else "rank 1 stopped, and so do all: ShortError: on 1"
    with pytest.raises(ShortError if mesh.rank == 1 else hs.CommError, match=words) as caught:
        agree(error, mesh)
    if mesh.rank == 2:
        assert caught.value.__cause__ is error


def test_alone_an_error_is_raised_as_it_is():
    mesh = init()
    agree(None, mesh)
    agree_on("anything", object(), mesh)
    with pytest.raises(ShortError, match="alone"):
        agree(ShortError("alone"), mesh)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "value", [None, (1, "two", 3.0), {"depth": [0, 9, 16]}, "x" * 10000], ids=type
)
def test_ranks_that_bring_the_same_go_on(value):
    agree_on("the value", value, init(height=3))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_ranks_that_differ_are_told_who_brings_what(odd):
    mesh = init(height=3)
    shape = (2, 3, 4) if mesh.rank == odd else (2, 3, 5)
    other = odd or 1
    mine, theirs = ((2, 3, 4), (2, 3, 5)) if odd == 0 else ((2, 3, 5), (2, 3, 4))
    with pytest.raises(hs.CommError) as caught:
        agree_on("the shapes", shape, mesh)
    words = f"ranks differ in the shapes: rank 0 has {mine}, rank {other} has {theirs}; "
    assert str(caught.value).startswith(words)
    agree_on("the shapes", (2, 3), mesh)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("place", [0, 500, 5000, 9999])
def test_long_values_are_shown_where_they_differ(place):
    mesh = init(height=2)
    value = ["same"] * 10000
    value[place] = f"rank {mesh.rank} was here"
    with pytest.raises(hs.CommError, match=r"rank 0 was here(?s:.*)rank 1 was here") as caught:
        agree_on("the values", value, mesh)
    assert len(str(caught.value)) < 1200


@pytest.mark.ranks(2)
def test_a_long_value_that_goes_on_where_the_other_ends_is_shown_there():
    mesh = init(height=2)
    value = ["same"] * (1000 + mesh.rank)
    with pytest.raises(hs.CommError, match=r"rank 0 has \.\.\. .*'same'\], rank 1 has \.\.\. "):
        agree_on("the values", value, mesh)
