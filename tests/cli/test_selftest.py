import os
from pathlib import Path

import pytest
import torch

from hyperslab.cli.selftest import Check, describe_exchange, rank_environ, run_selftest


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_two_ranks_on_gpus_agree_with_one_process():
    checks = run_selftest("cuda")
    assert [check.ok for check in checks] == [True, True, True]
    for cost in checks[-1].figures["exchanges"].values():
        assert cost["graph_us"] > 0
        assert 0 < cost["host_us"] <= cost["us"]


COST = {"64 KiB": {"us": 158.2, "graph_us": 17.4}, "1 MiB": {"us": 1078.0, "graph_us": None}}


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        (
            {"shares_gpu": True, "mps": True},
            "by NCCL: 158 us for 64 KiB (17 in a CUDA graph), 1078 us for 1 MiB; both ranks on one "
            "GPU, under MPS",
        ),
        ({"shares_gpu": True}, "one GPU, without MPS (nvidia-cuda-mps-control -d)"),
        ({"why_not_device": "rank 0: it has no triton"}, "1 MiB; rank 0: it has no triton"),
    ],
    ids=["mps", "no-mps", "no-triton"],
)
def test_what_an_exchange_costs_is_told_with_the_transport(figures, words):
    normal = {"messages_by": "NCCL", "why_not_device": "", "shares_gpu": False, "mps": False}
    assert words in describe_exchange(normal | {"exchanges": COST} | figures)


@pytest.mark.slow
def test_a_step_that_raises_is_a_failed_check_with_its_reason():
    [check] = run_selftest("no-such-device")
    assert check.name == "no-such-device: all_reduce"
    assert not check.ok
    assert "RuntimeError: " in check.detail


def test_ranks_that_take_too_long_are_ended():
    before = children()
    [check] = run_selftest("cpu", timeout_seconds=0.1)
    assert check == Check("cpu: all_reduce", False, "no answer within 0.1 s")
    assert children() == before


def children():
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_an_outer_launcher_does_not_reach_the_ranks():
    outer = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GROUP_RANK": "3",
        "SLURM_PROCID": "7",
        "SLURMD_NODENAME": "node01",
        "OMPI_COMM_WORLD_SIZE": "8",
        "PMI_RANK": "7",
        "PMIX_NAMESPACE": "job",
        "MPI_LOCALNRANKS": "8",
        "PALS_RANKID": "7",
        "RANK": "7",
        "MASTER_ADDR": "node01",
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    inner = rank_environ(outer, rank=1, port=29400)
    assert outer.keys() & inner.keys() == {"RANK", "MASTER_ADDR", "PATH", "CUDA_VISIBLE_DEVICES"}
    assert (inner["RANK"], inner["WORLD_SIZE"]) == ("1", "2")
    assert (inner["MASTER_ADDR"], inner["MASTER_PORT"]) == ("127.0.0.1", "29400")
