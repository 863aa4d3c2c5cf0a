"""Which transport ``init`` finds. Host memory stands for that of GPUs."""

import logging
import os
from importlib.util import find_spec

import pytest
import torch
from host_gpus import make_host_memory, use_host_gpus

import hyperslab as hs
from hyperslab.comm import device_setup, join
from hyperslab.comm.device_setup import Place
from hyperslab.testing import Team, seeded

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")


class Lines(logging.Handler):
    """Within it, what is logged, as level and text."""

    def __init__(self):
        super().__init__()
        self.told = []

    def emit(self, record):
        self.told.append((record.levelname, record.getMessage()))

    def __enter__(self):
        log = logging.getLogger("hyperslab")
        log.addHandler(self)
        log.setLevel(logging.INFO)
        return self.told

    def __exit__(self, *error):
        logging.getLogger("hyperslab").removeHandler(self)


def init(**words):
    return hs.init(**{"depth": 2, "timeout_seconds": 100, "device": "cpu"} | words)


def on_two(body, *args, **kwargs):
    with Team(2, timeout_seconds=200) as team:
        return team.run(body, *args, **kwargs)


def pooled_rightly(mesh):
    x = seeded(1, 2, 8, 4, 4).to(mesh.device)
    pool = torch.nn.functional.avg_pool3d
    ours, right = pool(hs.shard(x, mesh), 3, 1, 1), pool(x, 3, 1, 1)
    on_host = hs.gather(ours.cpu())
    assert on_host.device.type == "cpu"
    torch.testing.assert_close(on_host, right.cpu(), rtol=1e-12, atol=1e-12)
    return torch.allclose(hs.gather(ours), right, rtol=1e-12, atol=1e-12)


def choose(transports, device):
    if device == "cpu":
        use_host_gpus()
    meshes = [init(transport=transport, device=device) for transport in transports]
    assert len({id(mesh.transport) for mesh in meshes if mesh.transport}) <= 1
    return [(mesh.messages_by, str(mesh), pooled_rightly(mesh)) for mesh in meshes]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_auto_is_the_device_transport_where_it_works(device):
    by_host = "gloo through host memory" if device == "cuda" else "gloo"
    for auto, host, again in on_two(choose, ["auto", "host", "auto"], device):
        assert auto[0] == again[0] == "kernels that write into the memory of other ranks"
        assert auto[1].endswith("messages by kernels that write into the memory of other ranks)")
        assert host[0] == by_host
        assert auto[2]
        assert host[2]


def fall_back(what):
    """What rank 0 and the others log, and what ``device`` then says; never tried twice."""
    use_host_gpus()
    tries = []

    def make(nbytes, device):
        tries.append(nbytes)
        if what == "memory" and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory\nand more of it")
        return make_host_memory(nbytes)

    device_setup.make_symmetric_memory = make
    if what == "numbers":
        trial = device_setup._trial
        device_setup._trial = lambda *args: trial(*args) or "wrong" * (os.environ["RANK"] == "1")
    with Lines() as lines:
        meshes = [init(), init()]
    with pytest.raises(hs.ConfigError) as refused:
        init(transport="device")
    assert len(tries) == 1
    assert not any(mesh.transport for mesh in meshes)
    return lines, str(refused.value), pooled_rightly(meshes[1])


@pytest.mark.parametrize(
    ("what", "why"), [("memory", "CUDA out of memory"), ("numbers", "wrong")], ids=str
)
def test_what_fails_on_one_rank_is_used_by_none_and_told_once(what, why):
    told = on_two(fall_back, what)
    line = f"messages go by gloo, not on the GPUs alone: rank 1: {why}"
    assert [lines for lines, _, _ in told] == [[("WARNING", line)], []]
    for _, refused, is_right in told:
        assert f"reach each other's memory (rank 1: {why}); leave transport='auto'" in refused
        assert is_right


def stay_normal(nodes):
    if nodes > 1:
        use_host_gpus()
        rank = os.environ["RANK"]
        join.find_place = lambda device: Place((f"node{rank}", ""), "GPU", "")
    with Lines() as lines:
        assert init().transport is None
    return lines


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        (1, "rank 0: its device is cpu, not a GPU"),
        (2, "rank 0 is on node node0, rank 1 on another, node1"),
    ],
)
def test_cpus_and_several_nodes_are_no_reason_to_warn(nodes, why):
    line = f"messages go by gloo, not on the GPUs alone: {why}"
    assert on_two(stay_normal, nodes) == [[("INFO", line)], []]


def share(pipes):
    use_host_gpus(shared=True)
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = pipes
    device_setup.SLOW_SECONDS = 0.0
    with Lines() as lines:
        assert init().transport is not None
    return lines


@pytest.mark.slow
def test_ranks_that_take_turns_on_a_gpu_are_told_of_mps(tmp_path):
    (line,), others = on_two(share, str(tmp_path))
    assert line[0] == "WARNING"
    assert line[1].startswith("ranks share a GPU and take turns on it, ")
    assert "nvidia-cuda-mps-control -d" in line[1]
    assert others == []
    (tmp_path / "control").touch()
    assert on_two(share, str(tmp_path)) == [[], []]


def test_one_rank_without_a_gpu_has_no_device_transport():
    words = r"transport='device' needs GPUs .* \(the one rank's device is cpu, not a GPU\)"
    with pytest.raises(hs.ConfigError, match=words):
        hs.init(device="cpu", transport="device")


@pytest.mark.gpu
def test_one_rank_on_a_gpu_may_ask_for_the_device_transport():
    assert hs.init(device="cuda", transport="device").transport is None


def ask_for_nccl():
    with pytest.raises(hs.ConfigError, match="transport='nccl' needs a torch with NCCL and a GPU"):
        init(transport="nccl")


def test_nccl_is_not_for_cpus():
    on_two(ask_for_nccl)
