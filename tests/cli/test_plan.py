import json
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from hyperslab.cli import plan as module
from hyperslab.cli.main import main

NETS = """
import torch
from torch import nn


def make(width=4):
    return nn.Sequential(nn.Conv3d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2))


class Peeks(nn.Module):
    def forward(self, x):
        return x * x.sum().item()


def fails():
    raise ValueError("no such thing")
"""


@pytest.fixture
def nets(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # the folder of a file is added to it
    path = tmp_path / "nets.py"
    path.write_text(NETS)
    return str(path)


def plan(*arguments):
    result = CliRunner().invoke(main, ["plan", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def answer(*arguments):
    result = plan(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


PROGRAM = """
import sys
from hyperslab.cli.main import main
main({arguments}, standalone_mode=False)
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--help"],
        ["plan", "cosmoflow-512", "--gpus", "64", "--machine", "dgx-h100", "--batch", "16"],
    ],
)
def test_no_torch_is_loaded(arguments):
    code = PROGRAM.format(arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_preset(tmp_path):
    png, html = tmp_path / "curves.png", tmp_path / "plan.html"
    result = plan(
        *("cosmoflow-64", "--gpus", 4, "--machine", "lassen", "--batch", 8, "--layers"),
        *("--png", png, "--html", html, "--samples", 100, "--epochs", 3, "--max-rows", 2),
    )
    assert result.exit_code == 0
    assert result.stdout.startswith("cosmoflow-64, 8 samples a step, trains fastest on 4 x NVIDIA")
    assert "features.0.conv" in result.stdout
    assert "3 epochs of 100 samples: 39 steps, " in result.stdout
    assert png.read_bytes().startswith(b"\x89PNG")
    assert html.read_text().startswith("<!doctype html>")
    assert result.stderr == f"Curves: {png}\nPage: {html}\n"


def test_what_a_preset_says_is_the_default():
    found = answer("cosmoflow-64", "--gpus", 2, "--machine", "dgx-h100")
    assert (found["batch"], found["precision"], found["optimizer"]) == (32, "bf16", "adam")
    found = answer("cosmoflow-64", "--gpus", 2, "--machine", "laptop", "--batch", 4)
    assert (found["batch"], found["precision"]) == (4, "fp32")
    assert answer("resnet50", "--gpus", 1, "--machine", "dgx-h100")["optimizer"] in (
        "sgd",
        "momentum",
    )


def test_a_network_of_ones_own(nets):
    few = answer(f"{nets}:make", "--input", "1x32x32x32", "--gpus", 2, "--batch", 2)
    assert few["best"]["mesh"] == {"sample": 2}
    assert few["input_shape"] == [1, 32, 32, 32]
    change = ("--set", "model.options.width=64")
    many = answer(f"{nets}:make", "--input", "1x32x32x32", "--gpus", 2, "--batch", 2, *change)
    assert many["best"]["memory_bytes"] > 4 * few["best"]["memory_bytes"]


def test_a_name_alone_is_planned_for_the_fewest_gpus(nets):
    found = answer(f"{nets}:make", "--input", "1x512x512x512")
    assert (found["gpus"], found["batch"], found["machine"]) == (1, 1, "DGX H100")


def test_changes_to_a_preset_are_planned():
    whole = answer("cosmoflow-64", "--gpus", 1, "--machine", "lassen")
    change = ("--set", "model.options.base_channels=2")
    small = answer("cosmoflow-64", "--gpus", 1, "--machine", "lassen", *change)
    assert small["best"]["memory_bytes"] < whole["best"]["memory_bytes"]


def test_the_fewest_gpus_and_the_most_that_are_efficient():
    job = ("cosmoflow-512", "--machine", "lassen", "--batch", 2)
    fewest = answer(*job, "--fewest")["gpus"]
    assert plan(*job, "--gpus", fewest - 1).exit_code == 1
    found = answer(*job, "--efficiency", 0.8, "--gpus", 16)
    assert found["best"]["efficiency"] >= 0.8


def test_what_does_not_fit_is_one_line_or_json_without_a_best():
    job = ("cosmoflow-512", "--machine", "lassen", "--batch", 64, "--gpus", 1)
    result = plan(*job)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: No partition of cosmoflow-512, 64 samples a step, fits")
    assert "would do\n" in result.stderr
    result = plan(*job, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["best"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cosmoflow-64", "--gpus", 1, "--machine", "dgx-h10"], "no machine 'dgx-h10'; did you me"),
        (["cosmoflow-64", "--gpus", 1, "--machine", "no.toml"], "there is no file no.toml"),
        (["cosmoflow-65", "--gpus", 1], "neither a file nor a preset"),
        (["no.py:Net", "--gpus", 1, "--input", "1x8x8"], "there is no file"),
        (["NETS:make", "--gpus", 1], "needs the shape of a sample, such as --input 1x512x512x512"),
        (["NETS:make", "--gpus", 1, "--input", "2x8x8x8"], "a sample of 2x8x8x8 does not go thro"),
        (["NETS:Peeks", "--gpus", 1, "--input", "1x8x8"], "torch.Tensor.item does not run on ten"),
        (["NETS:fails", "--gpus", 1, "--input", "1x8x8"], "cannot be made: ValueError: no such th"),
        (["NETS:make", "--gpus", 1, "--set", "train.epochs=2", "--input", "1x8"], "--set train"),
        (["cosmoflow-64", "--efficiency", 7], "efficiency must be above 0 and at most 1, got 7"),
    ],
)
def test_bad_input_is_one_line(nets, arguments, message):
    words = [str(each).replace("NETS", nets) for each in arguments]
    result = plan(*words)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["cosmoflow-64", "--gpus", 0],
        ["cosmoflow-64", "--gpus", 1, "--batch", 0],
        ["cosmoflow-64", "--gpus", 1, "--input", "4xa"],
        ["cosmoflow-64", "--fewest", "--efficiency", 0.5],
    ],
)
def test_wrong_usage(arguments):
    result = plan(*arguments)
    assert result.exit_code == 2
    assert "Error: " in result.stderr


def test_a_subcommand_takes_the_rest(monkeypatch):
    @click.command()
    @click.option("--quick", is_flag=True)
    def measure(quick):
        click.echo(f"measured, quick={quick}")

    monkeypatch.setitem(module.SUBCOMMANDS, "measure", "made_up_module")
    monkeypatch.setitem(sys.modules, "made_up_module", type("Made", (), {"measure": measure}))
    assert plan("measure", "--quick").stdout == "measured, quick=True\n"
    assert "hyperslab plan measure" in plan("measure", "--help").stdout.replace("main", "hyperslab")
