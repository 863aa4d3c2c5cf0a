"""What shuffling and more ranks cost in I/O: two published studies, done again in small.

    python examples/io_study.py

High-energy physics: HEPCNN on images of collisions, 5 epochs, shuffled within each rank's share and
over all ranks. Climate: a segmentation of weather maps, 3 epochs. Both on 1, 2 and 4 ranks, on
synthetic data, from files that the first epoch reads from the disk; later epochs take samples from
the memory of the ranks. The studies had 64 to 1024 nodes: their times are not repeated, but what
they looked at is. Some two minutes on 2 cores; pages and pictures are in runs/io-study.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import hyperslab as hs


class Study(NamedTuple):
    title: str
    shuffles: tuple[str, ...]
    epochs: int
    batch_size: int
    preset: str
    normalize: str


STUDIES = {
    "hep": Study("High-energy physics", ("local", "global"), 5, 32, "hepcnn", "log1p"),
    "climate": Study("Climate", ("global",), 3, 4, "climate", "minmax"),
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/io-study"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--hep", type=int, default=256, help="images of collisions")
    parser.add_argument("--climate", type=int, default=24, help="maps of weather")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)  # as a rank
    options = parser.parse_args()
    if options.train:
        train_all(options.folder)
        return
    if any(options.folder.glob("*-*-*")):
        parser.error(f"{options.folder} has a study already: give another --folder, or remove it")
    hep, climate = options.folder / "data" / "hep", options.folder / "data" / "climate"
    hyperslab("data", "synth", "hep", "--size", 64, "--count", options.hep, hep)
    hyperslab("data", "synth", "climate", "--size", "48x96", "--count", options.climate, climate)
    for num in options.ranks:
        start = ["torch.distributed.run", "--standalone", "--nproc-per-node", num]
        run("-m", *start, __file__, "--train", "--folder", options.folder)
    for name, study in STUDIES.items():
        folders = [run_folder(options.folder, name, *each) for each in runs_of(study, options)]
        page = ["--html", options.folder / f"{name}.html"]
        picture = ["--png", options.folder / f"{name}.png"]  # of the last run, on the most ranks
        told = hyperslab("trace", "report", *folders, *page, "--json", stdout=subprocess.PIPE)
        hyperslab("trace", "report", folders[-1], *picture, stdout=subprocess.DEVNULL)
        print_table(study, json.loads(told))


def runs_of(study, options):
    return [(shuffle, num) for shuffle in study.shuffles for num in options.ranks]


def run_folder(folder, name, shuffle, num_ranks):
    return folder / f"{name}-{shuffle}-{num_ranks}"


def print_table(study, found):
    """As the studies told it: how long a rank read, and how long it trained."""
    print(f"\n{study.title}: {found['verdict']}")
    print("Seconds of a rank, and what share of them it waited for samples:")
    print("shuffle  ranks  read in epoch 1, in later ones  exchange   train  I/O share")
    for told in found["runs"]:
        epochs = [each["categories"] for each in told["epochs"]]
        first, *later = (seconds(each, "read", "decode") for each in epochs)
        mean, exchange = sum(later) / len(later), sum(seconds(e, "exchange") for e in epochs)
        print(
            f"{told['shuffle']:7} {told['num_ranks']:6} {first:16.3f} {mean:14.3f} {exchange:9.3f}"
            f" {told['seconds']:7.1f} {told['total']['io_exposed_share']:10.1%}"
        )


def seconds(categories, *names):
    return sum(categories.get(name, {"seconds": 0.0})["seconds"] for name in names)


# Training, on every rank


def train_all(folder):
    mesh = hs.init()
    for name, study in STUDIES.items():  # what a process does for the first time takes longer
        train(mesh, name, study, folder / "data" / name, "none", epochs=1)
    for name, study in STUDIES.items():
        for shuffle in study.shuffles:
            there = run_folder(folder, name, shuffle, mesh.num_ranks)
            if mesh.rank == 0:  # before the loader is made, which all ranks do together
                forget_cached(folder / "data" / name)
                there.mkdir(exist_ok=True)
                (there / "config.toml").write_text(f'[data]\nshuffle = "{shuffle}"\n')
            with hs.trace.recording(there / "trace"):
                train(mesh, name, study, folder / "data" / name, shuffle, study.epochs)


def train(mesh, name, study, data, shuffle, epochs):
    import torch

    dataset = hs.open(f"{data}/*.h5", preset=study.preset)
    settings = {"batch_size": study.batch_size, "normalize": study.normalize}
    loader = hs.Loader(dataset, mesh, shuffle=shuffle, store="memory", **settings)
    torch.manual_seed(0)
    model = hs.parallelize(network(name), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for x, *targets in loader:
            loss = torch.nn.functional.cross_entropy(model(x), targets[0])
            optimizer.zero_grad()
            loss.backward()
            with hs.span("optimizer", category="optimizer"):
                optimizer.step()
    loader.close()


def network(name):
    from hyperslab.models import HEPCNN, Tiramisu

    if name == "hep":
        return HEPCNN(channels=16)
    return Tiramisu(growth=4, blocks=(2, 2, 2), base_channels=8)


def forget_cached(folder):
    """Asks the system to read files from the disk again, as the first epoch of a new job would."""
    for path in folder.glob("*.h5"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def hyperslab(*arguments, **options):
    return run("-m", "hyperslab", *arguments, **options)


def run(*arguments, **options):
    words = [str(each) for each in arguments]
    print("\n$ python", *words, file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, *words], **options)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


if __name__ == "__main__":
    main()
