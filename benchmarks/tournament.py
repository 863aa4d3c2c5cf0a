"""Does a tournament find a better model, and what does it cost?

    python benchmarks/tournament.py
    python benchmarks/tournament.py --quick

*Quality*: four trainers, one rank each, learn synthetic cosmology, all from the same samples, with
learning rates that a seed has drawn from a range; with matches, and the same four without any, for
as many steps. Compared are the losses on validation samples that nobody has learned from: of the
tournament's winner, of the mean and of the best of the four that trained alone, for three seeds.

*Exchange*: two trainers of two ranks swap a model of 38 MB, whole on every rank: laid out in memory
by each, and read by both ranks of the other. Its time is that of the slowest rank, and the bar is
twice what a memcpy of 38 MB takes on all four ranks at once, in turns in the same run.

*Step*: the time of a step of a loop with ``Tournament.step``, matches aside, over that of a bare
one, in turns.

``--quick`` has one seed and fewer steps: is everything there? Its losses say nothing.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.models import CosmoFlow
from hyperslab.synth import Universes, produce
from hyperslab.testing import Team
from hyperslab.train.read_config import read_config
from hyperslab.train.run import run
from hyperslab.train.tournament.offer import Offer

MODEL_NBYTES = 38_000_000
AHEAD_SECONDS = 0.02
"""From where all know when to begin to the beginning."""
EVERY = 40
"""Steps from match to match: a model that learns slowly at first is not judged before."""
BARS = {"exchange": 2.0, "step": 1.05}


# Quality


def trained(files, folder, seed, epochs, every):
    """The validation losses of all trainers at their best, and the winner's."""
    changes = [
        f"data.files={files}",
        f"run.folder={folder}",
        "model.options={size = 16, base_channels = 4, dropout = 0.1, batch_norm = true}",
        "data.batch_size=4",
        "data.validation=0.3",
        "data.test=0",
        "mesh.device=cpu",
        f"train.epochs={epochs}",
        f"train.seed={seed}",
        "run.tensorboard=false",
        "run.figures=false",
        "tournament.trainers=4",
        f"tournament.every={every}",
        "tournament.data=all",
        "tournament.held_out=0.2",
        'tournament.ranges={"optimizer.lr" = [1e-5, 3e-2]}',
    ]
    summary = run(read_config("cosmoflow-64", changes)).summary
    scores = [each["score"] for each in summary["trainers"]]
    return scores, scores[
        [each["trainer"] for each in summary["trainers"]].index(summary["winner"])
    ]


def quality(team, folder, seeds, epochs, count):
    produce(Universes(size=16, count=count), folder / "cosmo")
    found = []
    for seed in seeds:
        files, never = str(folder / "cosmo" / "*.h5"), 10**9
        alone = team.run(trained, files, str(folder / f"alone-{seed}"), seed, epochs, never)[0][0]
        _, winner = team.run(trained, files, str(folder / f"games-{seed}"), seed, epochs, EVERY)[0]
        found.append(
            {
                "seed": seed,
                "winner": winner,
                "mean_alone": statistics.mean(alone),
                "best_alone": min(alone),
                "alone": alone,
            }
        )
    return found


# Exchange


class Wide(nn.Module):
    """Of 38 MB, in many tensors of unlike sizes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv3d(c, 2 * c, 3) for c in (4, 8, 16, 32, 64, 128))
        left = MODEL_NBYTES // 4 - sum(p.numel() for p in self.parameters())
        self.head = nn.Linear(left // 1000, 1000, bias=False)

    def forward(self, x):
        return x


def exchanges(rounds):
    """When exchanges, and memcpys of as many bytes, began on all ranks, and ended on this one."""
    found = {"exchange": [], "memcpy": []}
    with hs.Tournament(2, every=1, carry=()) as game:
        mesh = game.mesh(device="cpu")
        torch.manual_seed(game.trainer)
        parts = {"model": hs.parallelize(Wide(), mesh)}
        source, target = np.ones(MODEL_NBYTES, np.uint8), np.empty(MODEL_NBYTES, np.uint8)
        target[:] = 0
        works = {
            "memcpy": lambda number: np.copyto(target, source),
            "exchange": lambda number: exchange(game, number, parts),
        }
        for number in range(1, rounds + 1):
            for kind, work in works.items():
                start = start_together(game, f"{kind}-{number}")
                work(number)
                found[kind].append((start, time.perf_counter()))
    return found


def exchange(game, number, parts):
    """What a match does beside scoring: lay out, read, and say so."""
    other = 1 - game.trainer
    mine = game._exchange.lay_out(number, parts, {}, {other})
    found = game.others.await_offer(other, number, lambda: None)
    theirs, room = Offer.of_note(found["offer"]), game._exchange.room(found["trees"], parts)
    game._exchange.read(number, other, mine, theirs, room)
    game.others.post("done", number)
    game.number = number


def start_together(game, name):
    """Returns on all ranks of both trainers at the same time, as late ones would count as slow."""
    game.others.post(name, time.perf_counter() + AHEAD_SECONDS)
    names = [f"{name}-{trainer}" for trainer in range(2)]

    def look(board, is_late):
        told = [board.read(each) for each in names]
        return None if None in told else max(told)

    start = game.others.wait(look, lambda: None)
    time.sleep(max(0, start - time.perf_counter()))
    return start


def slowest(told, kind):
    """Seconds until the last rank was ready, of each round."""
    rounds = zip(*(each[kind] for each in told), strict=True)
    return [max(end - start for start, end in ranks) for ranks in rounds]


# Step


def steps(num):
    """Seconds of steps, bare and with ``Tournament.step``, in turns."""
    found = {"bare": [], "tournament": []}
    with hs.Tournament(2, every=10**9) as game:
        model = hs.parallelize(CosmoFlow(32, base_channels=2), game.mesh(device="cpu"))
        optimizer = torch.optim.Adam(model.parameters())
        x, y = torch.randn(2, 4, 32, 32, 32), torch.randn(2, 4)
        for number in range(2 * num):
            kind = "tournament" if number % 2 else "bare"
            start = time.perf_counter()
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            if kind == "tournament":
                game.step(model, optimizer, score=lambda: 0.0)
            found[kind].append(time.perf_counter() - start)
    return found


# Together


def measure(is_quick):
    seeds, epochs, count = ([0], 2, 48) if is_quick else ([0, 1, 2], 10, 192)
    result = {}
    with Team(4, timeout_seconds=3000) as team, tempfile.TemporaryDirectory() as name:
        told = team.run(exchanges, 5 if is_quick else 25)
        times = {kind: statistics.median(slowest(told, kind)) for kind in told[0]}
        result["exchange"] = {**times, "ratio": times["exchange"] / times["memcpy"]}
        result["quality"] = quality(team, Path(name), seeds, epochs, count)
    with Team(2, timeout_seconds=600) as team:
        told = team.run(steps, 20 if is_quick else 100)
        times = {kind: statistics.median(told[0][kind]) for kind in told[0]}
        result["step"] = {**times, "ratio": times["tournament"] / times["bare"]}
    return result


def show(result):
    for name in ("exchange", "step"):
        each = result[name]
        (other,) = {"memcpy", "bare"} & each.keys()
        mine = "exchange" if name == "exchange" else "tournament"
        met = "met" if each["ratio"] <= BARS[name] else "MISSED"
        print(
            f"{name}: {1e3 * each[mine]:.2f} ms, {other} {1e3 * each[other]:.2f} ms: "
            f"{each['ratio']:.3f} (bar {BARS[name]}, {met})"
        )
    print("seed  winner   mean alone  best alone")
    for each in result["quality"]:
        better = each["winner"] < each["mean_alone"], each["winner"] <= each["best_alone"]
        words = " ".join("met" if is_met else "MISSED" for is_met in better)
        print(
            f"{each['seed']:4}  {each['winner']:.4f}  {each['mean_alone']:10.4f}  "
            f"{each['best_alone']:10.4f}  {words}"
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed, few steps")
    parser.add_argument("--json", action="store_true", help="print JSON rather than a table")
    arguments = parser.parse_args()
    result = measure(arguments.quick)
    print(json.dumps(result, indent=2)) if arguments.json else show(result)


if __name__ == "__main__":
    main()
