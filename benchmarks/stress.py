"""Trains random networks on random meshes for a step each, and compares with one process.

    python benchmarks/stress.py --count 1000
    python benchmarks/stress.py --seed 123 --count 1     # one network again

Prints the seed of each network that is wrong, and exits with 1 if there is one.
"""

import collections
import json
import warnings

import click
from rich.progress import track

from hyperslab.testing.random_net import random_place
from hyperslab.testing.stress import draw_network, stress


@click.command(help=__doc__)
@click.option("--seed", default=0, show_default=True, help="Of the first network.")
@click.option("--count", default=1000, show_default=True, help="How many networks.")
@click.option("--device", default="cpu", show_default=True, help="Where the ranks compute.")
@click.option("--verbose", is_flag=True, help="Show refused networks too.")
def main(seed, count, device, verbose):
    warnings.filterwarnings("ignore", "Using padding='same' with even kernel")
    found = collections.Counter()
    seeds = range(seed, seed + count)
    for outcome in track(stress(seeds, device=device), "networks", total=count, transient=True):
        found[outcome.verdict] += 1
        if outcome.verdict == "wrong" or (verbose and outcome.verdict == "refused"):
            place = random_place(outcome.seed, draw_network(outcome.seed).sample.shape)
            print(f"seed {outcome.seed} on {place}: {outcome.verdict}: {outcome.reason}\n")
    counts = {verdict: found[verdict] for verdict in ("right", "refused", "wrong")}
    print(json.dumps({"networks": count, "first seed": seed, **counts}))
    raise SystemExit(1 if counts["wrong"] else 0)


if __name__ == "__main__":
    main()
