"""Does the loader deliver what the reader can read, and how does torch's DataLoader compare?

    python benchmarks/loader.py

Delivers 32 MiB boxes (int16, contiguous HDF5, in the page cache) in one process, by the loader
(store="none", so that it reads), by a loop of bare ``read`` calls into three ready buffers in turn,
as many as a loader with prefetch=2 has under way, and by torch's DataLoader over h5py with 0 and 2
workers. The variants take turns, once untimed and then timed: batches that were made ahead belong
to the epoch before. Shown is the fastest round of each, and the ratio to the bare reads. The limit
is what no loader can do without: the same reads by another thread, which hands each buffer over and
gets it back when the next one is taken. Reads into one buffer, which stays in the processor's
cache, are shown too. No box is touched after delivery. With augment="cube" the loader also turns
every sample, on a GPU or, without one, as it is read; the ratio to the same loader without it is
shown last. ``--quick`` leaves that out, and the workers.

With a GPU also: delivered there, by the loader as int16 and as log1p in bfloat16, by a DataLoader
with pinned memory and 4 workers, and by copies of one pinned buffer, which is the limit.
"""

import argparse
import json
import queue
import tempfile
import threading
import time
from pathlib import Path

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import hyperslab as hs
from hyperslab.io.engine.buffers import empty_aligned

IN_A_ROW = 3
LIMIT = "bare reads, another thread"


class H5Samples(Dataset):
    """What a user writes by hand."""

    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with h5py.File(self.paths[index], "r") as file:
            return torch.from_numpy(file["full"][...])


def write_samples(folder, shape, num):
    rng = np.random.default_rng(0)
    paths = [folder / f"{index:03}.h5" for index in range(num)]
    for path in paths:
        with h5py.File(path, "w") as file:
            file["full"] = rng.integers(0, 100, shape, dtype=np.int16)
    return paths


def drained(batches):
    count = 0
    for _ in batches:
        count += 1
    return count


def handed_over(data, box, buffers):
    """The samples of ``data``, read by another thread into ``buffers`` that are free."""
    free, full = queue.SimpleQueue(), queue.SimpleQueue()
    for buffer in buffers:
        free.put(buffer)

    def read_all():
        for index in range(len(data)):
            full.put(data.read(index, box, out=free.get()))

    reader = threading.Thread(target=read_all)
    reader.start()
    for _ in range(len(data)):
        taken = full.get()
        yield taken
        free.put(taken)
    reader.join()


def quick_variants(paths):
    """What ``bars`` looks at."""
    names = ("bare reads", LIMIT, "Loader", "Loader.numpy()", "DataLoader, 0 workers")
    runs = variants(paths)
    return {name: runs[name] for name in names}


def variants(paths):
    data = hs.open(paths, sample="full", axes="CDHW")
    ready = [empty_aligned(data.shape, data.dtype) for _ in range(3)]
    box = tuple(slice(0, extent) for extent in data.shape)
    mesh = hs.init(device="cpu")
    options = {"store": "none", "shuffle": "none"}
    slabs = hs.Loader(data, mesh, dtype=torch.int16, **options)
    arrays = hs.Loader(data, **options)
    turned_slabs = hs.Loader(data, mesh, dtype=torch.int16, augment="cube", **options)
    turned_arrays = hs.Loader(data, augment="cube", **options)

    def read_into(buffers):
        for index in range(len(data)):
            data.read(index, box, out=buffers[index % len(buffers)])
        return len(data)

    return {
        "bare reads": lambda: read_into(ready),
        LIMIT: lambda: drained(handed_over(data, box, ready)),
        "bare reads, one buffer": lambda: read_into(ready[:1]),
        "Loader": lambda: drained(slabs),
        "Loader.numpy()": lambda: drained(arrays.numpy()),
        "Loader, cube": lambda: drained(turned_slabs),
        "Loader.numpy(), cube": lambda: drained(turned_arrays.numpy()),
        "DataLoader, 0 workers": lambda: drained(DataLoader(H5Samples(paths))),
        "DataLoader, 2 workers": lambda: drained(DataLoader(H5Samples(paths), num_workers=2)),
    }


def gpu_variants(paths):
    data = hs.open(paths, sample="full", axes="CDHW")
    mesh = hs.init(device="cuda")
    pinned = torch.empty(data.shape, dtype=torch.int16, pin_memory=True)
    options = {"store": "none", "shuffle": "none", "prefetch": 3}
    raw = hs.Loader(data, mesh, dtype=torch.int16, **options)
    options |= {"dtype": torch.bfloat16, "normalize": "log1p"}
    ready = hs.Loader(data, mesh, **options)
    turned = hs.Loader(data, mesh, augment="cube", **options)

    def copies():
        for _ in paths:
            pinned.cuda(non_blocking=True)
        return finished(len(paths))

    def finished(count):
        torch.cuda.synchronize()
        return count

    def by_workers():
        loader = DataLoader(H5Samples(paths), num_workers=4, pin_memory=True)
        return drained(x.cuda(non_blocking=True) for x in loader)

    return {
        "to GPU: pinned copies": copies,
        "to GPU: Loader": lambda: finished(drained(raw)),
        "to GPU: Loader, log1p": lambda: finished(drained(ready)),
        "to GPU: Loader, log1p, cube": lambda: finished(drained(turned)),
        "to GPU: DataLoader, 4": lambda: finished(by_workers()),
    }


def measured(shape, num, rounds, is_quick):
    with tempfile.TemporaryDirectory() as folder:
        paths = write_samples(Path(folder), shape, num)
        runs = quick_variants(paths) if is_quick else variants(paths)
        if torch.cuda.is_available():
            runs |= gpu_variants(paths)
        nbytes = int(np.prod(shape)) * 2 * num
        rates = dict.fromkeys(runs, 0.0)
        for _ in range(rounds):
            for name, run in runs.items():
                run()
                for _ in range(1 if name.startswith("DataLoader") else IN_A_ROW):
                    start = time.perf_counter()
                    assert run() == num
                    rates[name] = max(rates[name], nbytes / (time.perf_counter() - start))
    return {
        name: {"GB/s": rate / 1e9, "of bare reads": rate / rates["bare reads"]}
        for name, rate in rates.items()
    }


def bars(report):
    """(what, measured, "<=" or ">=", bar, limit if any) for what ``--json`` prints."""
    ours = report["Loader"]
    theirs = report["DataLoader, 0 workers"]
    return [
        ("loader, of bare reads", ours["of bare reads"], ">=", 0.9, report[LIMIT]["of bare reads"]),
        ("loader, of DataLoader with 0 workers", ours["GB/s"] / theirs["GB/s"], ">=", 5.0),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="8x128x128x128", help="of one sample")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    shape = tuple(map(int, args.shape.split("x")))
    found = measured(shape, args.samples, args.rounds, args.quick)
    if args.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{args.samples} samples of {args.shape} int16")
    print(f"{'':28}{'GB/s':>8}{'of bare reads':>16}")
    for name, row in found.items():
        print(f"{name:28}{row['GB/s']:8.2f}{row['of bare reads']:16.2f}")
    ours = found["Loader"]["GB/s"]
    for name in found:
        if name.startswith("DataLoader"):
            print(f"Loader is {ours / found[name]['GB/s']:.1f} times as fast as {name}")
    for name in found:
        if name.endswith(", cube"):
            plain = name.removesuffix(", cube")
            print(f"{name}: {found[name]['GB/s'] / found[plain]['GB/s']:.2f} of {plain}")


if __name__ == "__main__":
    main()
