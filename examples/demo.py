"""From nothing to a network that tells the parameters of a universe, in two commands.

    python examples/demo.py

Makes universes from a real power spectrum, then trains CosmoFlow on them as demo.toml says: on
2 processes, each of which reads, keeps and computes half of every universe. The network is judged
by universes that it has never seen, and the demo fails if it is not clearly better there than
always guessing the mean.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path

CONFIG = Path(__file__).with_name("demo.toml")
LEAST_R2 = 0.3
LEARNED = {
    "sigma_8": "how strongly matter clumps: what this demo learns",
    "Omega_m": "how much matter there is: needs more cubes and steps than this",
}


def hyperslab(*arguments):
    """Shows a command, runs it, and ends with its exit code if that is not 0."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ hyperslab {shlex.join(words)}", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-m", "hyperslab", *words])
    if done.returncode:
        sys.exit(done.returncode)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", type=int, default=64, help="of a universe")
    parser.add_argument("--count", type=int, default=450, help="universes")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0, help="of universes and training")
    parser.add_argument("--set", action="append", default=[], help="change a setting of demo.toml")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="for all that is written")
    args = parser.parse_args()

    made = ["--size", args.size, "--count", args.count, "--seed", args.seed]
    universes = args.folder / f"universes-{args.size}x{args.count}-seed{args.seed}"
    print(
        f"Makes {args.count} universes of {args.size}x{args.size}x{args.size} in {universes},\n"
        "and trains a small CosmoFlow on them: a network that tells from how matter is spread\n"
        "which parameters a universe was made with. Minutes on 2 cores.",
        file=sys.stderr,
    )
    hyperslab("data", "synth", "cosmo", *made, "--jobs", 2, universes)

    run = args.folder / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    changes = [
        f"data.files={universes}/*.h5",
        f"model.options.size={args.size}",
        f"train.epochs={args.epochs}",
        f"train.seed={args.seed}",
        *args.set,
    ]
    settings = [word for change in changes for word in ("--set", change)]
    hyperslab("train", os.path.relpath(CONFIG), *settings, "--folder", run)

    scores = json.loads((run / "summary.json").read_text())["scores"]["test"]
    print("\nOn universes it has never seen (1 is perfect, 0 is always guessing the mean):")
    for name, what in LEARNED.items():
        print(f"R2 of {name} {scores[f'r2/{name}']:.3f}  ({what})")
    print(f"Figures are in {run / 'figures'}")
    print(f"Another run uses {universes} again, which can be deleted")
    print("Next: docs/quickstart.md does the same step by step")
    if not scores["r2/sigma_8"] > LEAST_R2:
        sys.exit(f"R2 of sigma_8 should be above {LEAST_R2}")


if __name__ == "__main__":
    main()
