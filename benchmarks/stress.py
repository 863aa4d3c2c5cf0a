"""Trains random networks on random meshes for a step each, and compares with one process.

    python benchmarks/stress.py --count 1000
    python benchmarks/stress.py --count 1000 --ways      # used in random ways: hooks, views, ...
    python benchmarks/stress.py --count 1000 --channels  # on meshes that cut channels, by plans
    python benchmarks/stress.py --seed 123 --count 1     # one network again

Prints the seed of each network that is wrong, and exits with 1 if there is one.
"""

import collections
import json
import warnings

import click
from fuzzing.networks import check_channels, draw_network, stress
from fuzzing.random_net import random_place
from fuzzing.ways_of_use import check_way
from rich.console import Console
from rich.progress import track


@click.command(help=__doc__)
@click.option("--seed", default=0, show_default=True, help="Of the first network.")
@click.option("--count", default=1000, show_default=True, help="How many networks.")
@click.option("--ways", is_flag=True, help="Use each network in a way drawn at random.")
@click.option("--channels", is_flag=True, help="Cut channels, and parts in other ways.")
@click.option("--device", default="cpu", show_default=True, help="Where the ranks compute.")
@click.option("--json", "as_json", is_flag=True, help="Print nothing but the counts, as JSON.")
@click.option("--verbose", is_flag=True, help="Show refused networks too.")
def main(seed, count, ways, channels, device, as_json, verbose):
    check = check_channels if channels else check_way if ways else None
    warnings.filterwarnings("ignore", "Using padding='same' with even kernel")
    found = collections.Counter()
    seeds = range(seed, seed + count)
    for outcome in track(
        stress(seeds, check=check, device=device),
        "networks",
        count,
        console=Console(stderr=True),
        transient=True,
    ):
        found[outcome.verdict] += 1
        told = outcome.verdict == "wrong" or (verbose and outcome.verdict == "refused")
        if told and not as_json:
            place = random_place(outcome.seed, draw_network(outcome.seed).sample.shape)
            print(f"seed {outcome.seed} on {place}: {outcome.verdict}: {outcome.reason}\n")
    counts = {verdict: found[verdict] for verdict in ("right", "refused", "wrong")}
    if as_json:
        print(json.dumps({"networks": count, "first seed": seed, **counts}))
    else:
        shown = ", ".join(f"{num} {verdict}" for verdict, num in counts.items())
        print(f"{count} networks from seed {seed} on: {shown}")
    raise SystemExit(1 if counts["wrong"] else 0)


if __name__ == "__main__":
    main()
