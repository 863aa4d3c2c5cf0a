"""How fast do ranks get their boxes of one sample, by reading each its own or by scattering?

    python benchmarks/parallel_read.py

A sample of 4 x 256^3 int16 lies in a contiguous HDF5 file, in the page cache. 2 and 4 ranks, split
along depth and along depth and height, fill buffers that are ready: each reading its box with
hyperslab, with h5py's ``read_direct`` and with MPI-IO (independent and collective, if there is an
``mpirun``); and by rank 0 reading the whole, packing the boxes and scattering them over gloo. The
variants take turns; a round lasts until the last rank has its box, and the fastest of all counts.
The limit is a bare ``pread`` of each stretch of the box.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np

import hyperslab as hs
from hyperslab.io.engine.buffers import empty_aligned

SPLITS = {2: {"D": (2, 1), "H": (1, 2)}, 4: {"D": (4, 1), "DxH": (2, 2)}}
NAME = "full"


def box_of(rank, split, shape):
    """The slices of ``rank``, channels first."""
    coords = np.unravel_index(rank, split)
    spans = [
        slice(extent * coord // num, extent * (coord + 1) // num)
        for extent, coord, num in zip(shape[1:3], coords, split, strict=True)
    ]
    return (slice(0, shape[0]), *spans, slice(0, shape[3]))


class ByHyperslab:
    def __init__(self, path, box, out):
        self.data, self.box, self.out = hs.open(path, sample=NAME, axes="CDHW"), box, out

    def __call__(self):
        self.data.read(0, self.box, self.out)


class ByH5py:
    def __init__(self, path, box, out):
        self.dataset, self.box, self.out = h5py.File(path, "r")[NAME], box, out

    def __call__(self):
        self.dataset.read_direct(self.out, self.box)


class ByPreads:
    """The limit: a bare ``pread`` of each stretch of the box."""

    def __init__(self, path, box, out):
        with h5py.File(path, "r") as file:
            first, shape = file[NAME].id.get_offset(), file[NAME].shape
        row_nbytes = shape[3] * 2
        places = np.arange(math.prod(shape[:3])).reshape(shape[:3])[box[:3]] * row_nbytes + first
        is_whole = box[2] == slice(0, shape[2])  # planes follow each other
        starts = places[:, 0, 0] if is_whole else places[:, :, 0].ravel()
        rows = out.reshape(len(starts), -1).view(np.uint8)
        self.reads = [((row.data,), int(start)) for row, start in zip(rows, starts, strict=True)]
        self.fd = os.open(path, os.O_RDONLY)

    def __call__(self):
        for buffer, start in self.reads:
            os.preadv(self.fd, buffer, start)


class ByScatter:
    """Rank 0 reads all and scatters; gloo knows no int16, and gets bytes."""

    def __init__(self, path, boxes, out):
        import torch
        import torch.distributed as dist

        self.scatter, self.rank = dist.scatter, dist.get_rank()
        self.received = torch.from_numpy(out).flatten().view(torch.uint8)
        self.boxes, self.packed = boxes, []
        if self.rank == 0:
            self.dataset = h5py.File(path, "r")[NAME]
            self.whole = touched(self.dataset.shape)
            self.buffers = [touched(self.whole[box].shape) for box in boxes]
            tensors = [torch.from_numpy(buffer) for buffer in self.buffers]
            self.packed = [tensor.flatten().view(torch.uint8) for tensor in tensors]

    def __call__(self):
        if self.rank == 0:
            self.dataset.read_direct(self.whole)
            for buffer, box in zip(self.buffers, self.boxes, strict=True):
                buffer[...] = self.whole[box]
        self.scatter(self.received, self.packed or None)


class ByMpi:
    def __init__(self, path, box, out, shape, collective):
        from mpi4py import MPI

        with h5py.File(path, "r") as file:
            offset = file[NAME].id.get_offset()
        starts = [part.start for part in box]
        kind = MPI.INT16_T.Create_subarray(shape, list(out.shape), starts).Commit()
        self.file = MPI.File.Open(MPI.COMM_WORLD, str(path), MPI.MODE_RDONLY)
        self.file.Set_view(offset, MPI.INT16_T, kind)
        self.read = self.file.Read_at_all if collective else self.file.Read_at
        self.out = out

    def __call__(self):
        self.read(0, self.out)


def touched(shape):
    array = empty_aligned(shape, np.int16)
    array[...] = -1
    return array


def work(path, store, split, rounds):
    """One rank: times every variant, and prints what rank 0 finds for all of them."""
    import torch
    import torch.distributed as dist

    under_mpi = "OMPI_COMM_WORLD_RANK" in os.environ or "PMI_RANK" in os.environ
    if under_mpi:
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.rank
    else:
        rank = int(os.environ["RANK"])
    num_ranks = math.prod(split)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks)
    with h5py.File(path, "r") as file:
        shape = file[NAME].shape
        boxes = [box_of(r, split, shape) for r in range(num_ranks)]
        box = boxes[rank]
        expected = file[NAME][box]
    out = touched(expected.shape)
    variants = {
        "hyperslab": ByHyperslab(path, box, out),
        "h5py": ByH5py(path, box, out),
        "rank 0 scatters": ByScatter(path, boxes, out),
        "limit: bare preads": ByPreads(path, box, out),
    }
    if under_mpi:
        variants["MPI-IO independent"] = ByMpi(path, box, out, shape, collective=False)
        variants["MPI-IO collective"] = ByMpi(path, box, out, shape, collective=True)
    times = dict.fromkeys(variants, math.inf)
    for number in range(rounds + 1):
        for name, variant in variants.items():
            out[...] = -1
            dist.barrier()
            start = time.perf_counter()
            variant()
            took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            assert number or np.array_equal(out, expected), f"{name} read something else"
            if number:
                times[name] = min(times[name], took.item())
    dist.barrier()
    if rank == 0:
        print(json.dumps(times))
    dist.destroy_process_group()


def mpi_command():
    """How to start ranks under MPI, or None where that is not possible."""
    launcher = shutil.which("mpirun")
    has_mpi4py = subprocess.run([sys.executable, "-c", "import mpi4py"], capture_output=True)
    if launcher is None or has_mpi4py.returncode:
        return None
    version = subprocess.run([launcher, "--version"], capture_output=True, text=True).stdout
    flags = []
    if "Open MPI" in version:
        flags = ["--oversubscribe", "--bind-to", "none"]
        flags += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [launcher, *flags]


def measure(path, split, rounds, launcher):
    num_ranks = math.prod(split)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        numbers = ["x".join(map(str, split)), str(rounds)]
        worker = [sys.executable, __file__, "--worker", str(path), f"{folder}/store", *numbers]
        if launcher:
            commands = [([*launcher, "-n", str(num_ranks), *worker], {})]
        else:
            commands = [(worker, {"RANK": str(rank)}) for rank in range(num_ranks)]
        ranks = [
            subprocess.Popen(
                command, env=environment | extra, stdout=subprocess.PIPE, stderr=sys.stderr
            )
            for command, extra in commands
        ]
        printed = [rank.communicate(timeout=900)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed")
    return json.loads(b"".join(printed).splitlines()[-1])


def write_sample(path, size):
    counts = np.random.default_rng(0).integers(0, 1000, (4, size, size, size), dtype=np.int16)
    with h5py.File(path, "w") as file:
        file[NAME] = counts


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=sorted(SPLITS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="2 ranks and fewer rounds")
    parser.add_argument("--dir", type=Path, help="where the file is written, for its file system")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args()
    if options.quick:
        options.ranks, options.rounds = [2], min(options.rounds, 9)
    launcher = mpi_command()
    if launcher is None:
        print("no mpirun or no mpi4py: MPI-IO is left out", file=sys.stderr)
    report = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        path = Path(folder) / "sample.h5"
        write_sample(path, options.size)
        for num_ranks in options.ranks:
            for name, split in SPLITS[num_ranks].items():
                times = measure(path, split, options.rounds, launcher)
                report[f"{num_ranks} ranks, {name}"] = {k: 1e3 * t for k, t in times.items()}
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        print_table(report, options.size)


def bars(report):
    """What is held against which bar: (what, measured, "<=" or ">=", bar, limit)."""
    return [
        (
            f"{case}: times as fast as rank 0 that scatters",
            row["rank 0 scatters"] / row["hyperslab"],
            ">=",
            5.0,
            row["rank 0 scatters"] / row["limit: bare preads"],
        )
        for case, row in report.items()
    ]


def print_table(report, size):
    names = list(next(iter(report.values())))
    print(f"ms until every rank has its box of 4 x {size}^3 int16 (times hyperslab's)")
    print(f"{'':22}" + "".join(f"{case:>22}" for case in report))
    for name in names:
        cells = [
            f"{row[name]:9.2f} ({row[name] / row['hyperslab']:5.2f}x)" for row in report.values()
        ]
        print(f"{name:22}" + "".join(f"{cell:>22}" for cell in cells))
    for what, measured, sign, bar, limit in bars(report):
        verdict = "met   " if measured >= bar else "MISSED"
        print(f"{verdict} {what}: {measured:.2f} {sign} {bar} (limit {limit:.2f})")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        file, store, split, rounds = sys.argv[2:]
        work(Path(file), store, tuple(map(int, split.split("x"))), int(rounds))
    else:
        main()
