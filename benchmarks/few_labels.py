"""Does pre-training without labels help where labels are few?

    python benchmarks/few_labels.py                  # 1, 5, 20 and 100% of the labels, three seeds
    python benchmarks/few_labels.py --quick          # little data, one seed: does it run?

On synthetic universes (errors of four cosmological parameters) and collisions (AUC of signal
against background) a stacked autoencoder is pre-trained on all samples to train on, without labels.
Then its encoder with a head is trained on a part of the labels, and the same network from scratch.

Both sides have the same network, labels, order of samples, batch size, optimizer and number of
steps, and the same settings to choose from: learning rates, each with the encoder as it is, at a
tenth of the rate, and at the full one (from scratch a frozen encoder is one of random weights).
Those with the best validation score at 5%, of the first seed, are taken for all of a side's runs.
Both take the weights of the step with the best validation score. Scores are those of the test part,
which nothing was chosen by; validation and test have all their labels. What pre-training takes in
time comes on top, and is printed.
"""

import itertools
import json
import statistics
import tempfile
import time
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from hyperslab.synth import Collisions, Universes, produce
from hyperslab.train.read_config import read_config
from hyperslab.train.run import run
from hyperslab.train.write_config import config_to_toml

FRACTIONS = (0.01, 0.05, 0.2, 1.0)
FEW = 0.05
RATES = (3e-3, 1e-2)
ENCODERS = {
    "frozen": "finetune.frozen=true",
    "slow": "finetune.encoder_rate=0.1",
    "alike": "finetune.encoder_rate=1",
}
GRID = [*itertools.product(RATES, ENCODERS)]
SIDES = ("pretrained", "scratch")
ALIKE = ["mesh.device=cpu", "run.tensorboard=false", "run.figures=false", "run.log_every=50"]


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    recipe: object
    score: str
    higher_is_better: bool
    beside: tuple
    """Other scores to print."""
    pretraining: list
    tuning: list
    steps: int
    """Of fine-tuning, for both sides."""

    def is_better(self, one, other):
        return one > other if self.higher_is_better else one < other


def cases(quick):
    cosmo = Case(
        name="cosmology",
        recipe=Universes(size=16 if quick else 32, count=60 if quick else 1000),
        score="mse",
        higher_is_better=False,
        beside=("r2/sigma_8", "r2/Omega_m"),
        pretraining=[
            "data.preset=cosmoflow",
            "data.normalize=log1p",
            "data.batch_size=16",
            "model.options={channels = [16], kernel = 8, stride = 4, activation = 'relu'}",
            "stages.epochs=4",
            "stages.noise=0.8",
            "train.epochs=1",
        ],
        tuning=[
            "task.names=['Omega_m','sigma_8','n_s','H_0']",
            "finetune.outputs=4",
            "finetune.pool=moments",
        ],
        steps=20 if quick else 60,
    )
    hep = Case(
        name="collisions",
        recipe=Collisions(shape=(32, 32), count=200 if quick else 2000, per_file=100),
        score="auc",
        higher_is_better=True,
        beside=(),
        pretraining=[
            "data.preset=hepcnn",
            "data.normalize=log1p",
            "data.batch_size=64",
            "model.options={in_channels = 3, channels = [32, 64], dims = 2, activation = 'relu'}",
            "stages.epochs=6",
            "stages.noise=0.5",
            "stages.l1=0.02",
            "train.epochs=1",
        ],
        tuning=[
            "task.kind=classification",
            "task.target=label",
            "task.names=['background','signal']",
            "finetune.outputs=2",
            "finetune.pool=mean",
        ],
        steps=20 if quick else 150,
    )
    return [cosmo, hep]


class Trial:
    """All runs of one case with one seed, in a folder."""

    def __init__(self, case, seed, data, folder):
        self._case, self._seed, self._folder = case, seed, folder / f"{case.name}-{seed}"
        self._data = [f"data.files={data}/*.h5", "data.validation=0.1", "data.test=0.2"]
        self._pretrained = self._folder / "pretrained"

    def pretrain(self):
        """The seconds that it took."""
        start = time.perf_counter()
        asked = [*ALIKE, *self._data, *self._case.pretraining, "optimizer.lr=2e-3"]
        named = [f"run.folder={self._pretrained}", f"train.seed={self._seed}"]
        run(read_config("autoencoder-conv", [*asked, *named]))
        return time.perf_counter() - start

    def tune(self, side, fraction, settings):
        """The scores on validation and test of the encoder with a head."""
        lr, encoder = settings
        per_step = max(1, fraction * self._num_to_train() / 16)
        epochs = max(1, round(self._case.steps / max(1, int(per_step))) + 1)
        asked = [
            *ALIKE,
            *self._case.tuning,
            f"finetune.run={self._pretrained}",
            "finetune.standardize=true",
            f"data.labelled_fraction={fraction}",
            "data.batch_size=16",
            "data.eval_batch_size=100",
            f"train.steps={self._case.steps}",
            f"train.epochs={epochs}",
            f"train.evaluate_every={max(1, epochs // 8)}",
            f"optimizer.lr={lr}",
            ENCODERS[encoder],
            f"run.folder={self._folder / f'{side}-{fraction}-{lr}-{encoder}'}",
        ]
        if side == "scratch":  # the same model and data, with the weights that the seed draws
            found = read_config("finetune", asked)
            tables = Path(self._folder / "scratch.toml")
            tables.write_text(_without_run(found))
            config = read_config(tables)
        else:
            config = read_config("finetune", asked)
        scores = run(config).summary["scores"]
        return {part: self._chosen(scores[part]) for part in ("validation", "test")}

    def _chosen(self, scores):
        return {name: scores[name] for name in (self._case.score, *self._case.beside)}

    def _num_to_train(self):
        return 0.7 * self._case.recipe.count


def _without_run(config):
    asked = replace(config.finetune, run=None, from_scratch=True)
    return config_to_toml(replace(config, finetune=asked))


def choose_settings(case, trial, side, grid):
    """Those with the best validation score at 5% of the labels, and the scores of all."""
    scores = {settings: trial.tune(side, FEW, settings) for settings in grid}
    best = (max if case.higher_is_better else min)(
        scores, key=lambda settings: scores[settings]["validation"][case.score]
    )
    return best, scores


def measure(case, seeds, fractions, folder, quiet, grid=GRID):
    data = folder / f"data-{case.name}"
    produce(case.recipe, data)
    trials = {seed: Trial(case, seed, data, folder) for seed in seeds}
    seconds = [trial.pretrain() for trial in trials.values()]
    chosen = {side: choose_settings(case, trials[seeds[0]], side, grid) for side in SIDES}
    rows = []
    for fraction in sorted(fractions, key=lambda each: each != FEW):
        for (seed, trial), side in itertools.product(trials.items(), SIDES):
            settings, tried = chosen[side]
            known = fraction == FEW and seed == seeds[0]
            scores = (tried[settings] if known else trial.tune(side, fraction, settings))["test"]
            row = {"side": side, "seed": seed, "fraction": fraction, "score": scores[case.score]}
            rows.append(row | scores)
            quiet.print_json(json.dumps({"case": case.name, **rows[-1]}), indent=None)
    return {
        "case": case.name,
        "score": case.score,
        "samples_to_train_on": round(0.7 * case.recipe.count),
        "steps": case.steps,
        "chosen": {side: shown(settings) for side, (settings, _) in chosen.items()},
        "tried": {
            side: {shown(settings): scores for settings, scores in tried.items()}
            for side, (_, tried) in chosen.items()
        },
        "pretraining_seconds": seconds,
        "rows": rows,
    }


def shown(settings):
    lr, encoder = settings
    return f"lr {lr:g}, encoder {encoder}"


def score_of(found, side, fraction, seed):
    return next(
        row["score"]
        for row in found["rows"]
        if (row["side"], row["fraction"], row["seed"]) == (side, fraction, seed)
    )


def is_better_with_few(found):
    """Whether the pre-trained side is better at 5% of the labels, by seed."""
    sign = 1 if found["score"] == "auc" else -1
    seeds = sorted({row["seed"] for row in found["rows"]})
    both = [[score_of(found, side, FEW, seed) for side in SIDES] for seed in seeds]
    return [sign * one > sign * other for one, other in both]


def table_of(found):
    seeds = sorted({row["seed"] for row in found["rows"]})
    what = "higher" if found["score"] == "auc" else "lower"
    table = Table(title=f"{found['case']}: {found['score']} of the test part ({what} is better)")
    for name in ("labels", "side", *(f"seed {seed}" for seed in seeds), "mean"):
        table.add_column(name, justify="right")
    for fraction in sorted({row["fraction"] for row in found["rows"]}):
        for side in SIDES:
            scores = [score_of(found, side, fraction, seed) for seed in seeds]
            cells = [*scores, statistics.mean(scores)]
            table.add_row(f"{fraction:.0%}", side, *(f"{score:.4f}" for score in cells))
    return table


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Less data, fewer steps, one seed.")
@click.option("--only", type=click.Choice(["cosmology", "collisions"]), help="One of the two.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keeps data and runs there.")
@click.option("--json", "to_json", is_flag=True, help="Print JSON rather than tables.")
def main(quick, only, folder, to_json):
    seeds, fractions = ((0,), (FEW, 1.0)) if quick else ((0, 1, 2), FRACTIONS)
    quiet = Console(stderr=True)
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        with (place / "runs.log").open("w", buffering=1) as log, redirect_stderr(log):
            found = [
                measure(case, seeds, fractions, place, quiet, GRID[-2:] if quick else GRID)
                for case in cases(quick)
                if only in (None, case.name)
            ]
    if to_json:
        click.echo(json.dumps(found, indent=1))
        return
    for each in found:
        Console().print(table_of(each))
        better = is_better_with_few(each)
        told = f"{sum(better)} of {len(better)} seeds"
        for side in SIDES:
            click.echo(f"{side}: {each['chosen'][side]}")
        click.echo(f"{each['case']}: with 5% of the labels pre-training is better for {told}")


if __name__ == "__main__":
    main()
