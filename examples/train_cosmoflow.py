"""Train CosmoFlow with a loop of your own: what `hyperslab train` does, to read and to copy.

    hyperslab data synth cosmo --size 64 --count 256 cosmo
    python examples/train_cosmoflow.py "cosmo/*.h5"
    torchrun --nproc-per-node 2 examples/train_cosmoflow.py "cosmo/*.h5" --depth 2

Started again, it goes on after the last whole epoch, on as many ranks as there are then.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import hyperslab as hs
from hyperslab.models import CosmoFlow
from hyperslab.train.checkpoints import Checkpoints

NAMES = ("Omega_m", "sigma_8", "n_s", "H_0")


def main():
    options = parse_options()
    mesh = hs.init(depth=options.depth)  # the other ranks share the batch
    data = hs.open(options.files, preset="cosmoflow").split(train=0.8, test=0.2)
    settings = {"batch_size": options.batch_size, "normalize": "log1p"}
    train = hs.Loader(data["train"], mesh, augment="cube", **settings)
    test = hs.Loader(data["test"], mesh, shuffle="none", **settings)

    torch.manual_seed(0)
    size = data["train"].shape[-1]
    net = CosmoFlow(size, base_channels=options.channels, dropout=options.dropout, batch_norm=True)
    model = hs.parallelize(net, mesh)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.99))
    state = {"model": model, "optimizer": optimizer, "loader": train}
    checkpoints = Checkpoints(options.checkpoints, mesh)  # all ranks write their part, and read it
    if checkpoints.latest() is not None:
        checkpoints.load(state)
    first = train.epoch
    autocast = torch.autocast(mesh.device.type, torch.bfloat16, enabled=options.bf16)

    with progress_bar(mesh) as bar:
        task = bar.add_task("", total=options.epochs * len(train), completed=first * len(train))
        for epoch in range(first, options.epochs):
            torch.manual_seed(epoch)  # of dropout: a run that was stopped goes on as it would have
            for step, (x, y) in enumerate(train):
                set_rate(optimizer, options, epoch + step / len(train), 1 / len(train))
                with autocast:
                    loss = F.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                bar.update(task, advance=1, description=f"epoch {epoch + 1}, loss {loss:.4f}")
            checkpoints.save(epoch + 1, state)  # while the next epoch is trained
    checkpoints.close()

    scores = evaluate(model, test, autocast)
    if mesh.rank == 0:
        for name, r2 in zip(NAMES, scores.tolist(), strict=True):
            print(f"R2 of {name:8} {r2:6.3f}  on {len(data['test'])} universes never seen")


def set_rate(optimizer, options, done, step):
    """The learning rate rises over the first epochs, half of all at most, then falls, along lines.

    ``done`` and the length of a ``step`` are in epochs.
    """
    warmup = min(options.warmup_epochs, options.epochs / 2)
    rising = (done + step) / max(warmup, step)
    falling = (options.epochs - done) / (options.epochs - warmup)
    for group in optimizer.param_groups:
        group["lr"] = options.lr * min(rising, falling, 1)


@torch.no_grad()
def evaluate(model, loader, autocast):
    """R2 of every parameter: 1 is perfect, 0 as good as always guessing the mean."""
    model.eval()
    with autocast:
        pairs = [(hs.gather(model(x)), hs.gather(y)) for x, y in loader]
    predicted, true = (torch.cat(rows).double() for rows in zip(*pairs, strict=True))
    return 1 - (predicted - true).square().sum(0) / (true - true.mean(0)).square().sum(0)


def progress_bar(mesh):
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    console = Console(stderr=True, quiet=mesh.rank > 0)
    return Progress(*columns, TimeRemainingColumn(), console=console)


def parse_options():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", help="universes, as a quoted pattern")
    parser.add_argument("--depth", type=int, default=1, help="ranks that share each cube")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--warmup-epochs", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=8, help="over all ranks")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--channels", type=int, default=16, help="of the first convolution")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--bf16", action="store_true", help="mixed precision, for GPUs")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
