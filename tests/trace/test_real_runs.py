"""Runs that are slow on purpose: the report finds what the same run measured by other means."""

import os
import time

import numpy as np
import pytest
import torch

import hyperslab as hs
from hyperslab.io.engine import files
from hyperslab.trace import Category
from hyperslab.trace.analysis.analysis import IO


@pytest.fixture
def images(tmp_path):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "images.npy", rng.normal(size=(24, 1, 16, 16)).astype("f4"))
    return str(tmp_path / "images.npy")


def train(mesh, images, folder, *, epochs, prefetch, slow):
    """Seconds that the loop waited for batches in each epoch.

    An epoch before them is not recorded: what is made for the first time takes longer.
    """
    data = hs.open(images, axes="NCHW")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.Flatten(), slow)
    model = hs.parallelize(net, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    waited = []

    def run_epoch():
        waited.append(0.0)
        batches = iter(loader)
        start = time.perf_counter()
        for x in batches:
            waited[-1] += time.perf_counter() - start
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            start = time.perf_counter()

    settings = {"batch_size": 4, "store": "none", "prefetch": prefetch}
    with hs.Loader(data, mesh, **settings) as loader:
        run_epoch()
        with hs.trace.recording(folder):
            for _ in range(epochs):
                run_epoch()
    return waited[1:]


@pytest.mark.slow
@pytest.mark.parametrize(("read", "compute"), [(0.04, 0.0), (0.05, 0.1)])
def test_the_io_that_a_throttled_reader_exposes_is_found(
    tmp_path, images, monkeypatch, read, compute
):
    preadv = os.preadv

    def throttled(*arguments):
        time.sleep(read)
        return preadv(*arguments)

    class Slow(torch.nn.Module):
        def forward(self, x):
            time.sleep(compute)
            return x

    monkeypatch.setattr(files.os, "preadv", throttled)
    mesh = hs.init(device="cpu")
    waited = train(mesh, images, tmp_path / "trace", epochs=2, prefetch=1, slow=Slow())
    found = hs.trace.report(tmp_path)
    for truth, period in zip(waited, found.analysis.epochs.values(), strict=True):
        assert period.exposed(*IO) == pytest.approx(truth, rel=0.05, abs=0.01)
        if compute:  # some reads go on meanwhile
            assert period.categories[Category.read].hidden_seconds > 2 * read
        else:
            assert period.exposed(Category.read) > truth / 2


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_rank_that_is_slower_than_the_other_is_found(tmp_path, images):
    mesh = hs.init(device="cpu")
    slept = []

    class Slow(torch.nn.Module):
        def forward(self, x):
            start = time.perf_counter()
            time.sleep(0.05 if mesh.rank == 1 else 0)
            slept.append(time.perf_counter() - start)
            return x

    folder = tmp_path / "trace"
    train(mesh, images, folder, epochs=2, prefetch=2, slow=Slow())
    del slept[: len(slept) // 3]  # of the epoch that was not recorded
    torch.distributed.barrier()
    found = hs.trace.report(folder)
    assert [rank.rank for rank in found.analysis.ranks] == [0, 1]
    [late] = found.stragglers
    assert (late.rank, late.category) == (1, Category.compute)
    if mesh.rank == 1:
        assert late.lag_seconds == pytest.approx(sum(slept), rel=0.2)
    assert "Rank 1" in found.verdict
