"""Which operator was the first to differ between ranks."""

import torch

from hyperslab.comm.journal import LENGTH, Journal, digest, first_difference
from hyperslab.layout import Layout


class Piece:
    """As a Slab has a layout."""

    def __init__(self, *shape):
        self.layout = Layout.unsplit(shape)


def journal_of(*functions):
    journal = Journal()
    for function in functions:
        journal.add(function, (Piece(2, 3),))
    return journal


def test_a_journal_gives_what_came_after_a_moment():
    journal = journal_of(torch.relu, torch.tanh, torch.sin)
    assert [entry.name for entry in journal.since(1)] == ["tanh", "sin"]
    assert str(journal.since(2)[0]) == "sin of 2x3, whole on every rank"


def test_a_journal_keeps_the_latest_entries_and_counts_all():
    journal = journal_of(*[torch.relu] * LENGTH, torch.tanh)
    assert journal.count == LENGTH + 1
    assert len(journal.since(0)) == LENGTH


def test_an_entry_shows_arguments_and_keeps_no_tensor_alive():
    journal = Journal()
    journal.add(torch.conv2d, (Piece(2, 3), torch.ones(4, 3), None, (1, 2)))
    (entry,) = journal.since(0)
    with_what = "a tensor of 4x3 in float32, None, (1, 2)"
    assert str(entry) == f"conv2d of 2x3, whole on every rank with {with_what}"
    assert not any(isinstance(argument, torch.Tensor) for argument in entry.arguments)
    other = Journal()
    other.add(torch.conv2d, (Piece(2, 3), torch.ones(4, 3), None, (1, 1)))
    assert digest(other.since(0)) != digest(journal.since(0))


def test_what_is_taken_back_was_never_there():
    journal = journal_of(torch.relu, torch.tanh)
    journal.forget_since(1)
    assert (journal.count, [entry.name for entry in journal.since(0)]) == (1, ["relu"])


def test_who_has_no_readers_notes_nothing():
    journal = Journal()
    journal.note(torch.relu, (Piece(2, 3),))
    assert journal.count == 0
    journal.has_readers = True
    journal.note(torch.relu, (Piece(2, 3),))
    assert [entry.name for entry in journal.since(0)] == ["relu"]


def test_digests_tell_operators_their_order_and_their_layouts_apart():
    same = digest(journal_of(torch.relu, torch.tanh).since(0))
    assert digest(journal_of(torch.relu, torch.tanh).since(0)) == same
    assert digest(journal_of(torch.tanh, torch.relu).since(0)) != same
    other = Journal()
    other.add(torch.relu, (Piece(3, 2),))
    other.add(torch.tanh, (Piece(2, 3),))
    assert digest(other.since(0)) != same


def test_the_first_difference_names_operator_and_rank():
    runs = {0: (5, ["a", "b", "c"]), 1: (4, ["z", "a", "b", "c"]), 2: (5, ["a", "x", "c"])}
    assert first_difference(runs, shared=8) == "operator 7 is b on rank 0 and x on rank 2"
    assert not first_difference({0: (5, ["a", "b"]), 1: (5, ["a"])}, shared=6)
    assert first_difference({0: (0, ["a"]), 1: (0, [])}, shared=1).endswith("nothing on rank 1")
