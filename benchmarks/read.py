"""What does a box of a sample in an HDF5 file cost, beside reading as many bytes in one piece?

    python benchmarks/read.py

Samples of 4 x 256^3 int16 (counts of particles in a clumpy universe, so that they compress as real
ones do) lie contiguous and in chunks, in the page cache. Boxes are read into a ready buffer by
``hyperslab.open(...).read``, on one thread and on two, and by h5py into a new array (``dset[...]``)
and into the buffer (``read_direct``). Given are multiples of one ``pread`` of as many bytes into a
page-aligned buffer. The variants take turns, each after other memory has filled the processor's
cache; the fastest of all rounds counts. For contiguous boxes the limit is shown too: a bare
``pread`` of each stretch, and a copy where rows are cut.
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
from hyperslab.io.engine.buffers import empty_aligned
from hyperslab.io.engine.threads import limited_to

NAME = "full"
CACHE_NBYTES = 64 << 20


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

    def ours():
        data.read(0, box, out)

    return {
        "hyperslab": ours,
        "hyperslab, 2 threads": ours,
        "h5py dset[...]": lambda: dataset[box],
        "h5py read_direct": lambda: dataset.read_direct(out, box),
    }


def fastest(variants, rounds):
    times = dict.fromkeys(variants, math.inf)
    other_memory = np.zeros(CACHE_NBYTES, np.uint8)
    for _ in range(rounds):
        for name, run in variants.items():
            other_memory += 1  # no variant finds its buffer in the processor's cache
            with limited_to(2 if name.endswith("2 threads") else 1):
                start = time.perf_counter()
                run()
                times[name] = min(times[name], time.perf_counter() - start)
    return times


def path_depth(path):
    with h5py.File(path, "r") as file:
        return file[NAME].shape[1]


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
    if "contiguous" in path.name and expected.shape[1] < path_depth(path):
        out[...] = -1
        (limit := bare_preads(path, box, out))()
        assert np.array_equal(out, expected), "limit"
        ways["limit: bare preads"] = limit
    plain = path.with_name("plain.bin").open("rb")
    times = fastest({"pread": lambda: os.preadv(plain.fileno(), [ready], 0), **ways}, rounds)
    return {name: took / times["pread"] for name, took in times.items()} | {
        "pread_ms": times["pread"] * 1e3
    }


def bare_preads(path, box, out):
    """The limit of a contiguous box: a bare ``pread`` of each stretch, and a copy if it has gaps.

    Of what is cut along width, stretches hold twice what is wanted.
    """
    with h5py.File(path, "r") as file:
        dataset = file[NAME]
        first, shape = dataset.id.get_offset(), dataset.shape
    row_nbytes, plane_nbytes = shape[3] * 2, shape[2] * shape[3] * 2
    fd = os.open(path, os.O_RDONLY)
    num, height, width = box[1].stop, box[2].stop, box[3].stop
    if height == shape[2]:  # whole planes follow each other
        rows = out.reshape(shape[0], -1).view(np.uint8)
        places = [first + channel * shape[1] * plane_nbytes for channel in range(shape[0])]
    else:
        cover = empty_aligned((num, height, shape[3]), np.int16)  # of one channel
        cover[...] = 1
        kept = out.reshape(-1, height * width) if width == shape[3] else cover
        rows = kept.reshape(kept.shape[0], -1).view(np.uint8)
        places = [
            first + (channel * shape[1] + plane) * plane_nbytes
            for channel in range(shape[0])
            for plane in range(num)
        ]
    assert rows.shape[1] % row_nbytes == 0
    buffers = [(row.data,) for row in rows]
    num_at_once = min(32, len(buffers))

    def read():
        for number, place in enumerate(places):
            if width == shape[3]:
                os.preadv(fd, buffers[number], place)
                continue
            at = number % num_at_once
            os.preadv(fd, buffers[at], place)
            if at == num_at_once - 1:
                channel, plane = divmod(number - at, num)
                out[channel, plane : plane + num_at_once] = cover[:num_at_once, :, :width]

    return read


CONTIGUOUS_BARS = {"D/4": 1.1, "D/2 x H/2": 1.5, "D/2 x H/2 x W/2": 2.5}
IS_INFLATED = ("64^3 gzip", "64^3 shuffle + gzip")
IS_DECODED = (*IS_INFLATED, "slabs bitshuffle + lz4")


def bars(report):
    """Of the layouts measured: (what, measured, "<=" or ">=", bar, limit if any)."""
    found = []
    for layout, boxes_and_size in report.items():
        rows = {box: row for box, row in boxes_and_size.items() if box != "stored"}
        if layout == "contiguous":
            for box, bar in CONTIGUOUS_BARS.items():
                what = f"contiguous, {box}: multiples of one pread"
                row = rows[box]
                found.append((what, row["hyperslab"], "<=", bar, row.get("limit: bare preads")))

        def ratios(one, other, rows=rows):
            return [row[one] / row[other] for row in rows.values()]

        worst = max(ratios("hyperslab", "h5py read_direct"))
        found.append((f"{layout}: slowest row, of h5py", worst, "<=", 1.0))
        if layout in IS_INFLATED:
            gain = min(ratios("h5py read_direct", "hyperslab"))
            found.append((f"{layout}: times h5py", gain, ">=", 2.0))
        if layout in IS_DECODED:
            gain = min(ratios("hyperslab", "hyperslab, 2 threads"))
            found.append((f"{layout}: gain by a second thread", gain, ">=", 1.5))
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="few rounds, in about a minute")
    parser.add_argument("--layouts", nargs="*", help="only those, by name")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args()
    if options.quick:
        options.rounds = min(options.rounds, 5)
    sample = universe(options.size)
    report = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "plain.bin").write_bytes(sample.tobytes())
        for number, (layout, how) in enumerate(layouts(options.size).items()):
            if options.layouts and layout not in options.layouts:
                continue
            path = Path(folder) / f"{number} {layout}.h5"
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
        lines.append(f"{layout} ({rows['stored']:.2f} of the size)")
        for box, row in rows.items():
            if box == "stored":
                continue
            limit = row.get("limit: bare preads")
            words = "" if limit is None else f"   limit: bare preads {limit:.2f}"
            lines.append(f"    {box:19}" + "".join(f"{row[name]:22.2f}" for name in names) + words)
    for what, measured, sign, bar, *_ in bars(report):
        met = measured <= bar if sign == "<=" else measured >= bar
        lines.append(f"{'met   ' if met else 'MISSED'} {what}: {measured:.2f} {sign} {bar}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
