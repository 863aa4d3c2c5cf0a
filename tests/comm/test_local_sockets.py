"""Sockets between ranks of one node, in one process and between processes."""

import functools
import os
import socket
import threading
import time

import pytest
import torch

import hyperslab as hs
from hyperslab.comm import local_sockets
from hyperslab.comm.local_sockets import MAX_NBYTES, LocalSockets
from hyperslab.testing import Team

init = functools.partial(hs.init, device="cpu", timeout_seconds=100)
SECONDS = 100.0


@pytest.fixture
def pair():
    """The sockets of ranks 0 and 1."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    found = LocalSockets({1: ends[0]}), LocalSockets({0: ends[1]})
    yield found
    for each in found:
        each.close()


def full(value, numel=3, dtype=torch.float64):
    return torch.full((numel,), value, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.complex128])
def test_a_message_arrives_whether_it_is_asked_for_before_or_after(pair, dtype):
    mine, theirs = pair
    sent = torch.arange(1, 7).reshape(2, 3).to(dtype)
    before, after = torch.zeros_like(sent), torch.zeros_like(sent)
    first = theirs.receive(0, 5, before, SECONDS)
    assert mine.send(1, 5, sent, SECONDS) is None
    first.wait()
    mine.send(1, 5, sent, SECONDS)
    theirs.receive(0, 5, after, SECONDS).wait()
    assert before.equal(sent)
    assert after.equal(sent)


def test_a_single_number_is_sent_whatever_its_stride(pair):
    mine, theirs = pair
    sent, got = full(3.0, 4)[1::2][1:], full(0.0, 1)
    assert sent.stride() == (2,)
    mine.send(1, 5, sent, SECONDS)
    theirs.receive(0, 5, got, SECONDS).wait()
    assert got.equal(sent)


def test_messages_of_several_tags_and_sizes_are_told_apart(pair):
    mine, theirs = pair
    sizes = {7: 4, 8: 1, 9: 100, 10: 0}
    for tag, size in sizes.items():
        mine.send(1, tag, full(tag, size), SECONDS)
    outs = {tag: full(-1.0, size) for tag, size in reversed(sizes.items())}
    asked = [theirs.receive(0, tag, out, SECONDS) for tag, out in outs.items()]
    for each in asked:
        each.wait()
    assert all(out.equal(full(tag, sizes[tag])) for tag, out in outs.items())


def test_messages_of_one_tag_keep_their_order(pair):
    mine, theirs = pair
    outs = [full(-1.0) for _ in range(4)]
    asked = [theirs.receive(0, 5, out, SECONDS) for out in outs[:2]]
    for value in range(4):
        mine.send(1, 5, full(float(value)), SECONDS)
    asked[1].wait()
    for each in (*asked, *(theirs.receive(0, 5, out, SECONDS) for out in outs[2:])):
        each.wait()
    assert [float(out[0]) for out in outs] == [0.0, 1.0, 2.0, 3.0]


def test_what_was_sent_may_be_written_into_at_once(pair):
    mine, theirs = pair
    sent = torch.zeros(MAX_NBYTES, dtype=torch.uint8)
    sends = [mine.send(1, 5, sent.fill_(value), SECONDS) for value in range(50)]
    assert any(sends), "the kernel had room for all: send more"
    reader = threading.Thread(target=lambda: [send.wait() for send in sends if send])
    reader.start()
    for value in range(50):
        out = torch.empty_like(sent)
        theirs.receive(0, 5, out, SECONDS).wait()
        assert out.eq(value).all()
    reader.join()


def test_two_ranks_that_wait_for_room_read_what_the_other_sent(pair):
    def send_many(sockets, peer, outs):
        big = torch.full((MAX_NBYTES,), peer, dtype=torch.uint8)
        for send in [sockets.send(peer, 5, big, SECONDS) for _ in range(50)]:
            if send:
                send.wait()
        for out in outs:
            sockets.receive(peer, 5, out, SECONDS).wait()

    outs = [[torch.empty(MAX_NBYTES, dtype=torch.uint8) for _ in range(50)] for _ in range(2)]
    other = threading.Thread(target=send_many, args=(pair[1], 0, outs[1]))
    other.start()
    send_many(pair[0], 1, outs[0])
    other.join()
    assert all(out.eq(rank).all() for rank in (0, 1) for out in outs[rank])


def test_threads_of_one_rank_get_each_its_own_message(pair):
    mine, theirs = pair
    outs = [full(-1.0), full(-1.0)]
    asked = [theirs.receive(0, tag, out, SECONDS) for tag, out in enumerate(outs)]
    waiting = threading.Thread(target=asked[0].wait)
    waiting.start()
    mine.send(1, 0, full(0.0), SECONDS)
    mine.send(1, 1, full(1.0), SECONDS)
    asked[1].wait()
    waiting.join()
    assert [float(out[0]) for out in outs] == [0.0, 1.0]


def test_a_rank_that_is_gone_or_late_or_sends_another_size_is_told(pair):
    mine, theirs = pair
    with pytest.raises(RuntimeError, match=r"rank 0 did not answer in 0\.05 s"):
        theirs.receive(0, 5, full(0.0), 0.05).wait()
    mine.send(1, 6, full(0.0, 2), SECONDS)
    with pytest.raises(RuntimeError, match="rank 0 sent 16 bytes where 24 were awaited"):
        theirs.receive(0, 6, full(0.0), SECONDS).wait()
    mine.close()
    with pytest.raises(RuntimeError, match="rank 0 has closed its connection"):
        theirs.receive(0, 7, full(0.0), SECONDS).wait()
    with pytest.raises(RuntimeError, match=r"rank 0 is gone \(Broken pipe\)"):
        theirs.send(0, 7, full(0.0), SECONDS)


def test_what_a_rank_sent_before_it_ended_is_read_though_it_left_messages_unread(pair):
    mine, theirs = pair
    mine.send(1, 5, full(1.0), SECONDS)
    theirs.send(0, 5, full(2.0), SECONDS)
    mine.close()
    theirs.receive(0, 5, out := full(-1.0), SECONDS).wait()
    assert out.equal(full(1.0))


def connect_in_threads(num_ranks):
    """What ``connect`` gives each rank, all of them threads of this process."""
    told, meet = [None] * num_ranks, threading.Barrier(num_ranks)
    found = [None] * num_ranks

    def body(rank):
        def tell_all(value):
            told[rank] = value
            meet.wait()
            everywhere = list(told)
            meet.wait()
            return everywhere

        found[rank] = local_sockets.connect(rank, tell_all)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_ranks_of_a_node_are_connected():
    found = connect_in_threads(4)
    for rank, mine in enumerate(found):
        for peer in set(range(4)) - {rank}:
            mine.send(peer, 5, full(float(rank)), SECONDS)
    for mine, rank in zip(found, range(4), strict=True):
        for peer in set(range(4)) - {rank}:
            out = full(-1.0)
            mine.receive(peer, 5, out, SECONDS).wait()
            assert out.equal(full(float(peer)))
    for each in found:
        each.close()


def test_strangers_who_connect_are_turned_away(monkeypatch):
    whole = local_sockets._connected

    def with_stranger(address, rank):
        strangers.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        strangers[-1].connect(f"\0{address.name}")
        strangers[-1].send(local_sockets._HELLO.pack(rank, bytes(16)))
        return whole(address, rank)

    strangers = []
    monkeypatch.setattr(local_sockets, "_connected", with_stranger)
    mine, theirs = connect_in_threads(2)
    assert strangers[0].recv(1) == b""
    mine.send(1, 5, full(3.0), SECONDS)
    theirs.receive(0, 5, out := full(-1.0), SECONDS).wait()
    assert out.equal(full(3.0))
    for each in (mine, theirs, *strangers):
        each.close()


def test_where_one_rank_cannot_be_reached_none_of_the_node_has_sockets(monkeypatch):
    whole = local_sockets._connected
    monkeypatch.setattr(
        local_sockets,
        "_connected",
        lambda address, rank: whole(address, rank) if rank < 2 else None,
    )
    assert connect_in_threads(3) == [None] * 3


@pytest.mark.ranks(2)
def test_sums_and_halos_of_a_mesh_on_cpus_use_sockets_unless_host_is_asked_for():
    with pytest.MonkeyPatch.context() as monkeypatch:
        mesh, by_gloo = init(height=2), init(height=2, transport="host")
        assert by_gloo.sockets is None
        calls = []
        monkeypatch.setattr(
            LocalSockets, "send", lambda *args, whole=LocalSockets.send: calls.append(whole(*args))
        )
        outs = {}
        for each in (mesh, by_gloo):
            x = hs.shard(torch.arange(24.0).reshape(1, 1, 4, 6), each)
            outs[each] = hs.gather(torch.nn.functional.avg_pool2d(x, 3, 1, 1)), float(x.sum())
            calls.append("next")
        assert calls.index("next") >= 2
        assert calls[-1] == "next"
        assert calls[-2] == "next"
        assert outs[mesh][0].equal(outs[by_gloo][0])
        assert outs[mesh][1] == outs[by_gloo][1] == 276.0


def meet_on_two_nodes():
    rank = int(os.environ["RANK"])
    os.environ["HYPERSLAB_NODE"] = f"node {rank // 2}"
    mesh = init(height=4)
    small = torch.zeros(1)
    assert [mesh.sockets.carries(peer, small) for peer in range(4)] == [
        peer // 2 == rank // 2 and peer != rank for peer in range(4)
    ]
    x = hs.shard(torch.arange(16.0).reshape(1, 1, 16, 1), mesh)
    assert float(x.sum()) == 120.0
    pooled = hs.gather(torch.nn.functional.max_pool2d(x, (3, 1), 1, (1, 0)))
    assert pooled.flatten().tolist() == [*range(1, 16), 15]


def test_ranks_of_two_nodes_meet_by_gloo_and_those_of_one_by_sockets():
    with Team(4) as team:  # of its own: all meshes of a process use the same sockets
        team.run(meet_on_two_nodes)


def test_nobody_waits_for_a_message_that_another_thread_has_read(pair, monkeypatch):
    mine, theirs = pair
    monkeypatch.setattr(local_sockets, "_SLICE_SECONDS", 0.01)
    asked = theirs.receive(0, 5, out := full(-1.0), SECONDS)
    waiting = threading.Thread(target=asked.wait)
    with theirs._lock:
        waiting.start()
        mine.send(1, 5, full(1.0), SECONDS)
        time.sleep(0.05)
        theirs._move(0)
    waiting.join()
    assert out.equal(full(1.0))
