"""The loader with a GPU: pinned buffers, copies on a stream of their own."""

import h5py
import numpy as np
import pytest
import torch

import hyperslab as hs
from hyperslab.testing import Team

pytestmark = pytest.mark.gpu


def body(pattern, axes, store):
    mesh = hs.init(**axes, device="cuda")
    data = hs.open(pattern, axes="CDHW")
    loader = hs.Loader(data, mesh, batch_size=4, store=store, normalize="log1p", prefetch=3)
    seen = []
    with loader:
        for _ in range(3):
            for x in loader:
                assert x.local.is_cuda
                # Work that keeps the stream busy, so that copies overtake what is not ordered.
                busy = torch.randn(2000, 2000, device="cuda")
                for _ in range(5):
                    busy = busy @ busy / 50
                whole = hs.gather(x).expm1()
                index = whole[:, 0, 0, 0, 0].round()
                assert bool((whole.round() == index.reshape(-1, 1, 1, 1, 1)).all())
                seen += index.tolist()
    assert sorted(seen) == sorted(list(range(18)) * 3)


@pytest.mark.parametrize("store", ["memory", "none"])
@pytest.mark.parametrize("axes", [{}, {"sample": 2}, {"depth": 2}], ids=str)
def test_what_arrives_on_the_gpu_is_what_the_files_hold(axes, store, tmp_path):
    for index in range(18):
        np.save(tmp_path / f"{index:02}.npy", np.full((2, 32, 64, 64), index, np.int16))
    num_ranks = int(np.prod(list(axes.values())))
    with Team(num_ranks, timeout_seconds=300) as team:
        team.run(body, str(tmp_path / "*.npy"), axes, store)


def turning(path, axes, store, dtype):
    """Slabs turned on the GPU are the arrays turned in host memory, epoch by epoch."""
    mesh = hs.init(**axes, device="cuda")
    data = hs.open(path, sample="image", target="label", axes="NDHWC")
    options = {"batch_size": 4, "store": store, "augment": "cube", "prefetch": 3}
    with (
        hs.Loader(data, mesh, dtype=dtype, **options) as on_gpu,
        hs.Loader(data, mesh, **options) as in_host,
    ):
        for _ in range(2):
            for slabs, arrays in zip(on_gpu, in_host.numpy(), strict=True):
                for slab, array in zip(slabs, arrays, strict=True):
                    want = torch.from_numpy(array).to(slab.dtype)
                    assert slab.local.is_contiguous()
                    assert torch.equal(slab.local.cpu(), want)


@pytest.mark.parametrize("dtype", ["i2", "u2", "f4"])
@pytest.mark.parametrize(
    ("axes", "store"), [({}, "memory"), ({}, "none"), ({"depth": 2, "height": 2}, "memory")]
)
def test_samples_are_turned_on_the_gpu(axes, store, dtype, tmp_path):
    image = np.random.default_rng(0).integers(0, 9999, (10, 32, 32, 32, 3)).astype(dtype)
    with h5py.File(tmp_path / "cubes.h5", "w") as file:
        file["image"], file["label"] = image, (image[..., 0] % 7).astype(np.int8)
    with Team(int(np.prod(list(axes.values()))), timeout_seconds=300) as team:
        for model in (torch.float32, torch.bfloat16):
            team.run(turning, str(tmp_path / "cubes.h5"), axes, store, model)
