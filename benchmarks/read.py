"""What does a box of a sample in an HDF5 file cost, beside reading as many bytes in one piece?

    python benchmarks/read.py

Samples of 4 x 256^3 int16 (counts of particles in a clumpy universe, so that they compress as real
ones do) lie contiguous and in chunks, in the page cache. Boxes are read into a ready buffer by
``hyperslab.open(...).read``, on one thread and on two, and by h5py into a new array (``dset[...]``)
and into the buffer (``read_direct``). Given are multiples of one ``pread`` of as many bytes into a
page-aligned buffer. The variants take turns; the fastest of all rounds counts.
"""

import argparse
import json
import math
import os
import tempfile
import time
from pathlib import Path

import h5py
import hdf5plugin
import numpy as np

import hyperslab as hs
from hyperslab.io.buffers import empty_aligned
from hyperslab.io.threads import limited_to

NAME = "full"


def layouts(size):
    cube = (1, *[min(64, size)] * 3)
    slab = (1, max(1, size // 16), size, size)
    return {
        "contiguous": {},
        "64^3 raw": {"chunks": cube},
        "64^3 gzip": {"chunks": cube, "compression": "gzip", "compression_opts": 4},
        "64^3 shuffle + gzip": {
            "chunks": cube,
            "compression": "gzip",
            "compression_opts": 4,
            "shuffle": True,
        },
        "slabs raw": {"chunks": slab},
        "slabs bitshuffle + lz4": {"chunks": slab, **hdf5plugin.Bitshuffle()},
    }


def boxes(size):
    half, all_ = slice(0, size // 2), slice(0, size)
    return {
        "full": (slice(0, 4), all_, all_, all_),
        "D/4": (slice(0, 4), slice(0, size // 4), all_, all_),
        "D/2 x H/2": (slice(0, 4), half, half, all_),
        "D/2 x H/2 x W/2": (slice(0, 4), half, half, half),
    }


def universe(size):
    """Poisson counts of a lognormal field, at four stages of its growth."""
    dice = np.random.default_rng(0)
    waves = [np.fft.fftfreq(size), np.fft.fftfreq(size), np.fft.rfftfreq(size)]
    k = np.sqrt(sum(w**2 for w in np.meshgrid(*waves, indexing="ij")))
    noise = np.fft.rfftn(dice.standard_normal((size, size, size), np.float32))
    smooth = np.fft.irfftn(noise * (k + 1 / size) ** -1.5, (size,) * 3, axes=(0, 1, 2))
    smooth *= 1.3 / smooth.std()
    density = [np.exp(growth * smooth - growth**2 * 0.85) for growth in (0.4, 0.6, 0.8, 1.0)]
    return np.stack([dice.poisson(field).astype(np.int16) for field in density])


def readers(path, box, out):
    """The ways to read, by name; the file is open and its metadata known."""
    data = hs.open(path, sample=NAME, axes="CDHW")
    dataset = h5py.File(path, "r")[NAME]

    def ours(num_threads):
        with limited_to(num_threads):
            data.read(0, box, out)

    return {
        "hyperslab": lambda: ours(1),
        "hyperslab, 2 threads": lambda: ours(2),
        "h5py dset[...]": lambda: dataset[box],
        "h5py read_direct": lambda: dataset.read_direct(out, box),
    }


def fastest(variants, rounds):
    times = dict.fromkeys(variants, math.inf)
    for _ in range(rounds):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            times[name] = min(times[name], time.perf_counter() - start)
    return times


def measure(path, box, expected, rounds):
    """Multiples of one pread, by the way to read."""
    out = empty_aligned(expected.shape, expected.dtype)
    ready = empty_aligned((out.nbytes,), np.uint8)
    ready[...] = 1
    ways = readers(path, box, out)
    for name, run in ways.items():
        out[...] = -1
        found = run()
        assert np.array_equal(out if found is None else found, expected), name
    plain = path.with_name("plain.bin").open("rb")
    times = fastest({"pread": lambda: os.preadv(plain.fileno(), [ready], 0), **ways}, rounds)
    return {name: took / times["pread"] for name, took in times.items()} | {
        "pread_ms": times["pread"] * 1e3
    }


def verdicts(report):
    """Each bar, with the numbers that it is held against."""

    def ours(layout, box):
        return report[layout][box]["hyperslab"]

    bars = [
        ("contiguous, D/4: at most 1.1", ours("contiguous", "D/4"), 1.1),
        ("contiguous, D/2 x H/2: at most 1.5", ours("contiguous", "D/2 x H/2"), 1.5),
        ("contiguous, D/2 x H/2 x W/2: at most 2.5", ours("contiguous", "D/2 x H/2 x W/2"), 2.5),
    ]
    found = [(text, number, number <= bar) for text, number, bar in bars]
    for layout in ("64^3 gzip", "64^3 shuffle + gzip"):
        gains = [row["h5py read_direct"] / row["hyperslab"] for row in report[layout].values()]
        found.append((f"{layout}: at least 2 times h5py", min(gains), min(gains) >= 2))
    for layout in ("64^3 gzip", "64^3 shuffle + gzip", "slabs bitshuffle + lz4"):
        gains = [row["hyperslab"] / row["hyperslab, 2 threads"] for row in report[layout].values()]
        found.append((f"{layout}: 2 threads at least 1.5 times", min(gains), min(gains) >= 1.5))
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layouts", nargs="*", help="only those, by name")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args()
    sample = universe(options.size)
    report = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "plain.bin").write_bytes(sample.tobytes())
        for number, (layout, how) in enumerate(layouts(options.size).items()):
            if options.layouts and layout not in options.layouts:
                continue
            path = Path(folder) / f"{number}.h5"
            with h5py.File(path, "w") as file:
                file.create_dataset(NAME, data=sample, **how)
            report[layout] = {
                box: measure(path, where, sample[where], options.rounds)
                for box, where in boxes(options.size).items()
            }
            report[layout]["stored"] = path.stat().st_size / sample.nbytes
            path.unlink()
    print(json.dumps(report, indent=1) if options.json else to_table(report))


def to_table(report):
    names = ["hyperslab", "hyperslab, 2 threads", "h5py read_direct", "h5py dset[...]"]
    lines = ["multiples of one pread " + "".join(f"{name:>22}" for name in names)]
    for layout, rows in report.items():
        lines.append(f"{layout} ({rows.pop('stored'):.2f} of the size)")
        for box, row in rows.items():
            lines.append(f"    {box:19}" + "".join(f"{row[name]:22.2f}" for name in names))
    if len(report) == len(layouts(64)):
        lines += [
            f"{'met ' if met else 'MISSED'} {text}: {n:.2f}" for text, n, met in verdicts(report)
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
