"""Train a small 3-D CNN on 2 processes, each with half of every cube, and once more on 1 process.

Every cube holds a noisy ball, and the network learns its radius. Run it as `make demo`, or

    python examples/demo.py --steps 60 --size 32
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn

import hyperslab as hs

BATCH_SIZE = 4


def small_cnn():
    def block(channels_in, channels_out):
        conv = nn.Conv3d(channels_in, channels_out, 3, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm3d(channels_out), nn.ReLU(), nn.MaxPool3d(2))

    body = [block(1, 8), block(8, 16), block(16, 16), nn.AdaptiveAvgPool3d(1), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(16, 1))


def noisy_balls(size, generator):
    """A batch of cubes with a ball of random radius in each, and the radii."""
    radius = torch.rand(BATCH_SIZE, 1, generator=generator, dtype=torch.float64)
    at = torch.linspace(-1, 1, size, dtype=torch.float64)
    distance = (at**2 + at[:, None] ** 2 + at[:, None, None] ** 2).sqrt()
    inside = distance < radius.view(-1, 1, 1, 1, 1)
    noise = torch.randn(BATCH_SIZE, 1, size, size, size, generator=generator, dtype=torch.float64)
    return inside + 0.5 * noise, radius


def train(mesh, steps, size):
    """The loss of every step; the same on every rank, and on any mesh."""
    torch.manual_seed(0)
    model = hs.parallelize(small_cnn().double(), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    losses = []
    console = Console(stderr=True, quiet=mesh.rank > 0)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[loss]}")
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(f"{mesh.num_ranks} process(es)", total=steps, loss="")
        for _ in range(steps):
            cubes, radii = noisy_balls(size, generator)
            x, y = hs.shard(cubes, mesh), hs.shard(radii, mesh)
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            progress.update(task, advance=1, loss=f"loss {losses[-1]:.4f}")
    return losses


def train_on_two_processes(arguments):
    """Starts this file on 2 processes with torchrun and gives the losses that rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "losses.json"
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [sys.executable, *torchrun, __file__, *arguments, "--losses", str(file)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return json.loads(file.read_text())


def show(split, single):
    table = Table(title="Loss (mean squared error of the radius)")
    for heading in ("step", "2 processes, split along depth", "1 process", "difference"):
        table.add_column(heading, justify="right")
    for step in sorted(
        {0, *range(len(split) // 6, len(split), max(1, len(split) // 6)), len(split) - 1}
    ):
        ours, alone = split[step], single[step]
        table.add_row(str(step + 1), f"{ours:.6f}", f"{alone:.6f}", f"{abs(ours - alone):.1e}")
    Console().print(table)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--size", type=int, default=32, help="edge of a cube")
    parser.add_argument("--losses", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.losses:  # one of the two processes that torchrun started
        mesh = hs.init(depth=2, device="cpu")
        losses = train(mesh, options.steps, options.size)
        if mesh.rank == 0:
            options.losses.write_text(json.dumps(losses))
        return
    split = train_on_two_processes(["--steps", str(options.steps), "--size", str(options.size)])
    single = train(hs.init(device="cpu"), options.steps, options.size)
    show(split, single)
    worst = max(abs(a - b) for a, b in zip(split, single, strict=True))
    same = worst < 1e-9
    falls = sum(split[-5:]) < sum(split[:5])
    verdict = "the same" if same else "NOT THE SAME"
    print(f"The losses of 2 processes and of 1 differ by at most {worst:.1e}: {verdict}.")
    sys.exit(0 if same and falls else 1)


if __name__ == "__main__":
    main()
