"""docs/architecture.md: its table names every package, and its operator, format and kernel work."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyperslab as hs
from hyperslab.nn.op import IMPLEMENTED, OPS
from hyperslab.testing import Team, seeded

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PROGRAMS = dict(re.findall(r"```python\n# an? (\w+)\n(.*?)```", PAGE, re.S))
MOST_LINES = 20
"""Of a program, with imports and blank lines."""


def test_the_table_names_what_there_is():
    named = {name for row in re.findall(r"^\| (`.*?) \|", PAGE, re.M) for name in row.split("`")}
    source = ROOT / "src" / "hyperslab"
    for name in named:
        assert not re.fullmatch(r"[\w/.]+", name) or (source / name).exists(), name
    packages = {path.parent.name for path in source.glob("*/__init__.py")}
    assert packages <= named
    assert {f"nn/{path.parent.name}" for path in source.glob("nn/*/__init__.py")} <= named


@pytest.mark.parametrize("name", re.findall(r"`((?:nn|comm|dist_ops)/[\w/]+\.py)`", PAGE))
def test_files_that_are_named_are_there(name):
    assert (ROOT / "src" / "hyperslab" / name).exists()


def test_pictures_are_there():
    pictures = re.findall(r"\]\((pictures/.*?)\)", PAGE)
    assert len(pictures) == 2
    assert all((ROOT / "docs" / picture).exists() for picture in pictures)


def test_programs_are_short():
    assert {*PROGRAMS} == {"operator", "format", "kernel"}
    for program in PROGRAMS.values():
        assert len(program.strip().splitlines()) <= MOST_LINES


def run_operator(program):
    before = OPS.get(torch.special.entr)
    exec(program, {})
    try:
        x = seeded(2, 3, 7, 4, 4).abs()
        out = torch.special.entr(hs.shard(x, hs.init(depth=2, device="cpu")))
        torch.testing.assert_close(hs.gather(out), torch.special.entr(x))
    finally:
        OPS[torch.special.entr] = before


def test_the_operator_is_right_on_two_ranks():
    with Team(2) as team:
        team.run(run_operator, PROGRAMS["operator"])


def test_the_format_is_read(tmp_path):
    exec(PROGRAMS["format"], {})
    image = np.arange(49, dtype=np.uint8).reshape(7, 7)
    (tmp_path / "one.sq8").write_bytes(image.tobytes())
    data = hs.open(tmp_path / "one.sq8", sample="image", axes="HW")
    found = data.read(0, (slice(2, 5), slice(1, 7)))
    np.testing.assert_array_equal(found, image[2:5, 1:7])


def run_kernel(program, axes):
    before, seen = OPS[F.silu], []
    names = {}
    exec(program.replace("piece * torch", "seen.append(len(piece)) or piece * torch"), names)
    names["seen"] = seen
    try:
        mesh = hs.init(**axes, device="cpu")
        x = seeded(2, 3, 7, 4, 4)
        out = hs.parallelize(nn.Sequential(nn.SiLU(), nn.Conv3d(3, 2, 1).double()), mesh)
        F.silu(hs.shard(x.float(), mesh))
        assert not seen  # it is not for that dtype
        given = hs.shard(x, mesh)
        torch.testing.assert_close(hs.gather(out[0](given)), x * torch.sigmoid(x))
        out(given)
        assert len(seen) == 2
    finally:
        OPS[F.silu] = before
        IMPLEMENTED.discard(F.silu)


@pytest.mark.parametrize("axes", [{}, {"depth": 2}], ids=str)
def test_the_kernel_computes_pieces(axes):
    with Team(2 if axes else 1) as team:
        team.run(run_kernel, PROGRAMS["kernel"], axes)
