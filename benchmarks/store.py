"""What does it bring to serve samples from the memory of the ranks?

    python benchmarks/store.py

Ranks of one node visit 32 MiB samples (int16, contiguous HDF5) under a global shuffle, each rank
taking whole samples, so that boxes move between ranks at every step of the second epoch. Measured
are the bytes a second that all ranks together are given: from files (warm, and cold: the page cache
is dropped before), in the first epoch, which fills the store, in later ones, which are served from
memory, and by plain memcpy of as many bytes between buffers that are ready. Shown is the
median of the rounds, since more ranks than cores begin a round at odd times. Beside it: the bytes
that each rank read in the first epoch, by the kernel's own count, over its share of the data.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np
import torch.distributed as dist

import hyperslab as hs
from hyperslab.io.buffers import empty_aligned
from hyperslab.testing import Team


def write_samples(folder, shape, num):
    rng = np.random.default_rng(0)
    for index in range(num):
        with h5py.File(folder / f"{index:03}.h5", "w") as file:
            file["full"] = rng.integers(0, 100, shape, dtype=np.int16)


def bytes_read():
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def drop_cache(folder):
    for path in Path(folder).glob("*.h5"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def timed(run, mesh):
    """Seconds from the first rank's start to the last one's end."""
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start


def epoch(loader):
    for _ in loader.numpy():
        pass


def copy_all(sources, targets, num):
    for index in range(num):
        np.copyto(targets[index % len(targets)], sources[index % len(sources)])


def body(folder, rounds, num_ranks):
    """Bytes a second of each variant, and the share that this rank read; equal on all ranks."""
    mesh = hs.init(sample=num_ranks, device="cpu")
    data = hs.open(f"{folder}/*.h5", sample="full")
    sample_nbytes = int(np.prod(data.shape)) * data.dtype.itemsize
    options = {"batch_size": num_ranks, "shuffle": "global"}
    num_mine = len(data) // num_ranks
    rates = {}

    def note(name, seconds):
        rates.setdefault(name, []).append(len(data) * sample_nbytes / seconds)

    with hs.Loader(data, mesh, store="none", **options) as files:
        epoch(files)
        for _ in range(rounds):
            note("files, warm", timed(lambda: epoch(files), mesh))
        for _ in range(rounds):
            files.close()  # or it would have read ahead
            if mesh.rank == 0:
                drop_cache(folder)
            note("files, cold", timed(lambda: epoch(files), mesh))
    with hs.Loader(data, mesh, store="memory", **options) as loader:
        before = bytes_read()
        note("memory, first epoch", timed(lambda: epoch(loader), mesh))
        share = (bytes_read() - before) / (num_mine * sample_nbytes)
        for _ in range(rounds):
            note("memory, later epochs", timed(lambda: epoch(loader), mesh))
        later = (bytes_read() - before) / (num_mine * sample_nbytes) - share
    sources = [np.ones(sample_nbytes, np.uint8) for _ in range(num_mine)]
    targets = [empty_aligned((sample_nbytes,), np.uint8) for _ in range(3)]
    for _ in range(rounds + 1):
        note("memcpy", timed(lambda: copy_all(sources, targets, num_mine), mesh))
    shares = [None] * num_ranks
    dist.all_gather_object(shares, (share, later))
    return {name: statistics.median(each) for name, each in rates.items()}, shares


def measured(shape, num, rounds, num_ranks):
    with tempfile.TemporaryDirectory() as folder, Team(num_ranks, timeout_seconds=600) as team:
        write_samples(Path(folder), shape, num)
        rates, shares = team.run(body, folder, rounds, num_ranks)[0]
    return {
        "GB/s": {name: rate / 1e9 for name, rate in rates.items()},
        "of memcpy": {name: rate / rates["memcpy"] for name, rate in rates.items()},
        "bytes read / share, first epoch": [first for first, _ in shares],
        "bytes read / share, later epochs": [later for _, later in shares],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="4x64x256x256", help="of one sample")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    shape = tuple(map(int, args.shape.split("x")))
    found = {str(n): measured(shape, args.samples, args.rounds, n) for n in args.ranks}
    if args.json:
        print(json.dumps(found, indent=2))
        return
    for num_ranks, result in found.items():
        print(f"\n{num_ranks} ranks, {args.samples} samples of {args.shape} int16")
        print(f"{'':24}{'GB/s':>8}{'of memcpy':>12}")
        for name, rate in result["GB/s"].items():
            print(f"{name:24}{rate:8.2f}{result['of memcpy'][name]:12.2f}")
        for when in ("first epoch", "later epochs"):
            shares = result[f"bytes read / share, {when}"]
            print(f"bytes read / share, {when}: {min(shares):.4f} to {max(shares):.4f}")


if __name__ == "__main__":
    main()
