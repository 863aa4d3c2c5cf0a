"""Do larger cubes predict cosmological parameters better?

    python benchmarks/cube_size.py --folder universes --make-only
    python benchmarks/cube_size.py --folder universes --cubes 64,128 --minutes 4
    python benchmarks/cube_size.py --folder universes --cubes 256 --minutes 4

The same universes are given to CosmoFlow whole, and cut into smaller cubes. They are split into
those to train on, to validate and to test with before they are cut, so that no universe is in two
of these parts. Every network sees the same voxels as often (`--epochs`), or learns for the same
time (`--minutes`), and is tested with the weights that were best in validation. A batch has 2^24
voxels (`--batch-voxels`), and four cubes at least, for BatchNorm.

Parameters are scaled to [-1, 1]: who always guesses their mean has an MSE of about 0.333, and an
R2 of 0. Scores are given twice: of single cubes, and of universes. For the latter the predictions
of all cubes of a universe are averaged, as one would do with a network that takes small cubes only.
"""

import argparse
import copy
import itertools
import json
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.comm.launch import find_launch
from hyperslab.models import CosmoFlow
from hyperslab.synth import Universes, produce

NAMES = ("Omega_m", "sigma_8", "n_s", "H_0")
PARTS = {"train": 0.8, "validation": 0.1, "test": 0.1}
LEAST_CUBES = 4


def make(args, folder):
    """Makes the universes that are not in the folder yet."""
    recipe = Universes(size=args.size, count=args.count, seed=args.seed)
    made = produce(recipe, folder, jobs=args.jobs)
    say(
        f"{args.size}^3: made {made.made} universes in {made.seconds:.0f} s, {made.kept} were there"
    )


def open_parts(args, folder, cube):
    """The cubes of each part; the universes are split before they are cut."""
    recipe = Universes(size=args.size, count=args.count)
    paths = [str(folder / recipe.file_name(index)) for index in range(args.count)]
    parts = hs.open(paths, preset="cosmoflow").split(seed=args.seed, **PARTS)
    return {name: part.tiled(cube) for name, part in parts.items()}


def make_loader(args, mesh, part, **how):
    cubes = max(LEAST_CUBES, args.batch_voxels // part.shape[-1] ** 3)
    settings = {"batch_size": cubes, "normalize": "log1p", "seed": args.seed, "preload": True}
    return hs.Loader(part, mesh, threads=args.threads, **settings, **how)


def make_model(args, mesh, cube):
    torch.manual_seed(args.seed)
    net = CosmoFlow(cube, base_channels=args.channels, dropout=args.dropout, batch_norm=True)
    if mesh.device.type == "cuda":
        net = net.to(memory_format=torch.channels_last_3d)
    return hs.parallelize(net, mesh)


def train(args, mesh, parts, model):
    """Trains to the end, leaves the best weights in the model, and tells what it took."""
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.99))
    best, best_error, steps, begin = None, float("inf"), 0, None
    with (
        make_loader(args, mesh, parts["train"], augment="cube") as loader,
        make_loader(args, mesh, parts["validation"], shuffle="none") as validation,
    ):
        predict(mesh, model, validation)  # so that the time of reading does not count
        for epoch in itertools.count():
            for step, (x, y) in enumerate(loader):
                begin = begin or time.perf_counter()
                done = progress(args, epoch + step / len(loader), time.perf_counter() - begin)
                if done >= 1:
                    break
                learn(args, mesh, model, optimizer, x, y, done)
                steps += 1
            error = mse(*predict(mesh, model, validation)).mean().item()
            say(f"  epoch {epoch}, {done:4.0%}: validation MSE {error:.4f}")
            if error < best_error:
                best, best_error = copy.deepcopy(model.state_dict()), error
            if done >= 1 or (not args.minutes and epoch + 1 == args.epochs):
                break
    if best is None:
        sys.exit("training diverged: no validation had a finite MSE; try a smaller --lr")
    model.load_state_dict(best)
    seconds = time.perf_counter() - begin
    return {"epochs": steps / len(loader), "steps": steps, "seconds": seconds}


def progress(args, epoch, seconds):
    """From 0 to 1, by the clock or by epochs."""
    return seconds / (60 * args.minutes) if args.minutes else epoch / args.epochs


def learn(args, mesh, model, optimizer, x, y, done):
    """One step; the learning rate rises over the first twentieth of the way, then falls to 0."""
    model.train()
    for group in optimizer.param_groups:
        group["lr"] = args.lr * min(20 * done + 1e-3, 1 - done)
    with autocast(mesh):
        loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@torch.no_grad()
def predict(mesh, model, loader):
    """What the model says of all cubes, in their order, and what is true."""
    model.eval()
    with autocast(mesh):
        pairs = [(hs.gather(model(x)), hs.gather(y)) for x, y in loader]
    predicted, true = (torch.cat(rows).double().cpu() for rows in zip(*pairs, strict=True))
    return predicted, true


def autocast(mesh):
    return torch.autocast("cuda", torch.bfloat16) if mesh.device.type == "cuda" else nullcontext()


def mse(predicted, true):
    return (predicted - true).square().mean(0)


def scores(predicted, true):
    errors, spread = mse(predicted, true), mse(true.mean(0), true)
    return {
        "MSE": errors.mean().item(),
        "MSE by parameter": dict(zip(NAMES, errors.tolist(), strict=True)),
        "R2 by parameter": dict(zip(NAMES, (1 - errors / spread).tolist(), strict=True)),
    }


def measured(args, mesh, folder, cube):
    parts = open_parts(args, folder, cube)
    num = (args.size // cube) ** 3
    say(f"{cube}^3: {len(parts['train'])} cubes of {len(parts['train']) // num} universes")
    model = make_model(args, mesh, cube)
    effort = train(args, mesh, parts, model)
    with make_loader(args, mesh, parts["test"], shuffle="none") as loader:
        predicted, true = predict(mesh, model, loader)
    by_universe = [rows.unflatten(0, (-1, num)).mean(1) for rows in (predicted, true)]
    return {
        "cube": cube,
        **effort,
        "cubes in training": len(parts["train"]),
        "cubes in test": len(true),
        "universes in test": len(true) // num,
        "by cube": scores(predicted, true),
        "by universe": scores(*by_universe),
    }


def show(results):
    for key, what in (("by cube", "single cubes"), ("by universe", "universes, cubes averaged")):
        print(f"\nTest of {what}: MSE, and R2 by parameter")
        print(f"{'cube':>6}{'epochs':>8}{'steps':>8}{'tested':>8}{'MSE':>9}", end="")
        print("".join(f"{name:>9}" for name in NAMES))
        for found in results:
            tested = found["cubes in test" if key == "by cube" else "universes in test"]
            print(f"{found['cube']:6}{found['epochs']:8.1f}{found['steps']:8}{tested:8}", end="")
            print(f"{found[key]['MSE']:9.4f}", end="")
            print("".join(f"{r2:9.3f}" for r2 in found[key]["R2 by parameter"].values()))


def say(text):
    print(text, file=sys.stderr, flush=True)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=256, help="of a universe")
    parser.add_argument("--count", type=int, default=320, help="universes")
    parser.add_argument("--cubes", default="64,128,256", help="sizes to cut them into")
    parser.add_argument("--folder", type=Path, help="of the universes, which stay there")
    parser.add_argument("--make-only", action="store_true", help="do not train")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="that make universes")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--minutes", type=float, help="for each size, in place of --epochs")
    parser.add_argument("--batch-voxels", type=int, default=2**24)
    parser.add_argument("--channels", type=int, default=16, help="of the first convolution")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="that read and augment")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if (num_ranks := find_launch().num_ranks) > 1:
        parser.error(f"this runs in one process, not in {num_ranks}: start it without a launcher")
    args.cubes = [int(cube) for cube in args.cubes.split(",")]
    if wrong := [cube for cube in args.cubes if args.size % cube]:
        parser.error(f"universes of {args.size} cannot be cut into cubes of {wrong[0]}")
    if args.make_only and not args.folder:
        parser.error("--make-only needs a --folder to make them in")
    return args


def main():
    args = parse_arguments()
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        make(args, folder)
        if args.make_only:
            return
        mesh = hs.init()
        results = [measured(args, mesh, folder, cube) for cube in args.cubes]
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name != "folder"}
        print(json.dumps({"settings": settings, "results": results}, indent=2))
    else:
        show(results)


if __name__ == "__main__":
    main()
