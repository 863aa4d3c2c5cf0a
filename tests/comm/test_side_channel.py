from dataclasses import replace
from types import SimpleNamespace

import pytest

import hyperslab as hs
from hyperslab.comm.agree import agree_on
from hyperslab.comm.side_channel import SideChannel, ask_first, do_on_first, do_together
from hyperslab.errors import CommError, ConfigError, FormatError


def fail_on(rank, mesh, error):
    def call():
        if mesh.rank == rank:
            raise error
        return "fine"

    return call


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ConfigError("no such thing"), ConfigError, "^no such thing$"),
        (FileNotFoundError(2, "No such file", "a.h5"), FormatError, "^a.h5: No such file$"),
        (MemoryError("too much"), CommError, "^rank 1: MemoryError: too much$"),
    ],
)
def test_an_error_on_one_rank_is_the_same_on_all(error, kind, words):
    mesh = hs.init(sample=2, device="cpu")
    channel = SideChannel(mesh, "testing")
    with pytest.raises(kind, match=words):
        do_together(fail_on(1, mesh, error), channel)
    assert do_together(fail_on(2, mesh, error), channel) == "fine"
    channel.close()


@pytest.mark.ranks(3)
def test_ranks_tell_each_other_values_of_any_length():
    """What fits into the first message, into two, and what is too long for both."""
    mesh = hs.init(sample=3, device="cpu")
    channel = SideChannel(mesh, "testing")
    for length in (0, 1, 4000, 4088, 4089, 5000, 70_000, 200_000):
        mine = [mesh.rank, "x" * (length * mesh.rank // 2)]
        assert channel.tell_all(mine) == [[rank, "x" * (length * rank // 2)] for rank in range(3)]
    channel.close()


@pytest.mark.ranks(2)
def test_what_rank_0_finds_or_fails_at_all_know():
    mesh = hs.init(sample=2, device="cpu")
    channel = SideChannel(mesh, "testing")
    assert ask_first(lambda: mesh.rank, channel) == 0
    do_on_first(fail_on(1, mesh, ConfigError("never called")), channel)
    with pytest.raises(ConfigError, match="only rank 0 saw it"):
        ask_first(fail_on(0, mesh, ConfigError("only rank 0 saw it")), channel)
    channel.close()


@pytest.mark.ranks(2)
def test_a_side_channel_talks_while_a_pass_is_tried_out_for_a_graph():
    trying_out = SimpleNamespace(is_silent=True)
    mesh = replace(hs.init(sample=2, device="cpu"), transport=trying_out)
    channel = SideChannel(mesh, "testing")
    with pytest.raises(CommError, match="a CUDA graph cannot send"):
        agree_on("seeds", 1, mesh)
    assert channel.tell_all(mesh.rank) == [0, 1]
    assert channel.merge_faults({7: "torn"} if mesh.rank else {}) == {7: "torn (rank 1)"}
    channel.close()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("nodes", [1, 3])
def test_the_largest_number_and_the_faults_of_all_ranks_are_found(nodes):
    with pytest.MonkeyPatch.context() as monkeypatch:
        mesh = hs.init(sample=3, device="cpu")
        monkeypatch.setenv("HYPERSLAB_NODE", f"node {mesh.rank % nodes}")
        channel = SideChannel(mesh, "testing")
        assert (channel._sockets is None) == (nodes == 3)
        waits = [channel.post_max(number) for number in (mesh.rank, -mesh.rank, 5)]
        assert [wait() for wait in waits] == [2, 0, 5]
        assert channel.merge_faults({}) == {}
        mine = {mesh.rank: "bad", 7: "worse"} if mesh.rank else {}
        assert channel.merge_faults(mine) == {
            1: "bad (rank 1)",
            2: "bad (rank 2)",
            7: "worse (rank 1)",
        }
        channel.close()
