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


def train(mesh, images, folder, *, epochs, prefetch, slow=None, **options):
    """Seconds that the loop waited for batches in each epoch, and those of each pass."""
    data = hs.open(images, axes="NCHW")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.Flatten())
    if slow:
        net.append(slow)
    model = hs.parallelize(net, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    waited, passes = [], []
    with (
        hs.Loader(data, mesh, batch_size=4, store="none", prefetch=prefetch, **options) as loader,
        hs.trace.recording(folder),
    ):
        for _ in range(epochs):
            waited.append(0.0)
            batches = iter(loader)
            start = time.perf_counter()
            for batch in batches:
                got = time.perf_counter()
                waited[-1] += got - start
                loss = model(batch[0] if isinstance(batch, tuple) else batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                start = time.perf_counter()
                passes.append(start - got)
    return waited, passes


@pytest.mark.slow
@pytest.mark.parametrize(("read", "compute"), [(0.04, 0.0), (0.05, 0.1), (0.01, 0.15)])
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
    slow = Slow()
    waited, _ = train(mesh, images, tmp_path / "trace", epochs=3, prefetch=1, slow=slow)
    found = hs.trace.report(tmp_path)
    for truth, period in zip(waited, found.analysis.epochs.values(), strict=True):
        print(read, compute, truth, period.exposed(*IO), period.exposed(Category.read), period.seconds)
