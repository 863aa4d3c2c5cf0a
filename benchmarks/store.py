"""What does it bring to serve samples from the memory of the ranks?

    python benchmarks/store.py

Ranks of one node visit 32 MiB samples (int16, contiguous HDF5) under a global shuffle, each rank
taking whole samples, so that boxes move between ranks at every step of the second epoch. Measured
are the bytes a second that all ranks together are given: from files (warm, and cold: the page cache
is dropped before), in the first epoch, which fills the store, in later ones, which are served from
memory, and by plain memcpy of as many bytes between buffers that are ready: of this rank's own
memory, and of memory like the store's that another rank shares, which is the limit. The last three
take turns, each several times in a row, once untimed: batches that were made ahead belong to the
epoch before. Shown is the median of the rounds, since more ranks than cores begin a round at odd
times. Beside it: the bytes that each rank read in the first epoch, by the kernel's own count, over
its share of the data. ``--quick`` has 2 ranks, and leaves out cold files.
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
from hyperslab.io.engine.buffers import empty_aligned
from hyperslab.store.segment import Segment, map_segment
from hyperslab.testing import Team

LIMIT = "memcpy, shared memory"
IN_A_ROW = 3


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


def body(folder, rounds, num_ranks, is_quick):
    """Bytes a second of each variant, and the share that this rank read; equal on all ranks."""
    mesh = hs.init(sample=num_ranks, device="cpu")
    data = hs.open(f"{folder}/*.h5", sample="full", axes="CDHW")
    sample_nbytes = int(np.prod(data.shape)) * data.dtype.itemsize
    options = {"batch_size": num_ranks, "shuffle": "global"}
    num_mine = len(data) // num_ranks
    rates = {}

    def note(name, run):
        rates.setdefault(name, []).append(len(data) * sample_nbytes / timed(run, mesh))

    with hs.Loader(data, mesh, store="none", **options) as files:
        epoch(files)
        for _ in range(rounds):
            note("files, warm", lambda: epoch(files))
        for _ in range(0 if is_quick else rounds):
            files.close()  # or it would have read ahead
            if mesh.rank == 0:
                drop_cache(folder)
            note("files, cold", lambda: epoch(files))
    copies = memcpy_variants(num_mine, sample_nbytes, mesh)
    with hs.Loader(data, mesh, store="memory", **options) as loader:
        before = bytes_read()
        note("memory, first epoch", lambda: epoch(loader))
        share = (bytes_read() - before) / (num_mine * sample_nbytes)
        for _ in range(rounds):
            for name, run in {"memory, later epochs": lambda: epoch(loader), **copies}.items():
                run()
                for _ in range(IN_A_ROW):
                    note(name, run)
        later = (bytes_read() - before) / (num_mine * sample_nbytes) - share
    shares = [None] * num_ranks
    dist.all_gather_object(shares, (share, later))
    return {name: statistics.median(each) for name, each in rates.items()}, shares


def memcpy_variants(num, nbytes, mesh):
    """Copies of ``num`` samples, of this rank's memory and of what the next one shares."""
    own = np.ones(num * nbytes, np.uint8)
    segment = Segment(num * nbytes)
    segment.reserve(0, num * nbytes)
    segment.bytes[:] = 1
    addresses = [None] * mesh.num_ranks
    dist.all_gather_object(addresses, segment.address)
    theirs = map_segment(addresses[(mesh.rank + 1) % mesh.num_ranks])
    targets = [empty_aligned((nbytes,), np.uint8) for _ in range(3)]
    return {
        "memcpy": lambda: copy_all(own.reshape(num, nbytes), targets, num),
        LIMIT: lambda: copy_all(theirs.reshape(num, nbytes), targets, num),
    }


def measured(shape, num, rounds, num_ranks, is_quick):
    with tempfile.TemporaryDirectory() as folder, Team(num_ranks, timeout_seconds=600) as team:
        write_samples(Path(folder), shape, num)
        rates, shares = team.run(body, folder, rounds, num_ranks, is_quick)[0]
    return {
        "GB/s": {name: rate / 1e9 for name, rate in rates.items()},
        "of memcpy": {name: rate / rates["memcpy"] for name, rate in rates.items()},
        "bytes read / share, first epoch": [first for first, _ in shares],
        "bytes read / share, later epochs": [later for _, later in shares],
    }


def bars(report):
    """(what, measured, "<=" or ">=", bar, limit if any) for what ``--json`` prints."""
    found = []
    for ranks, result in report.items():
        of_memcpy = result["of memcpy"]
        what = f"store, later epochs, {ranks} ranks, of memcpy"
        found.append((what, of_memcpy["memory, later epochs"], ">=", 0.7, of_memcpy[LIMIT]))
        most = max(result["bytes read / share, later epochs"])
        found.append((f"store, later epochs, {ranks} ranks, bytes read / share", most, "<=", 0.01))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="4x64x256x256", help="of one sample")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--ranks", type=int, nargs="+", help="2 and 4, if not given")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    shape = tuple(map(int, args.shape.split("x")))
    ranks = args.ranks or ([2] if args.quick else [2, 4])
    found = {str(n): measured(shape, args.samples, args.rounds, n, args.quick) for n in ranks}
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
