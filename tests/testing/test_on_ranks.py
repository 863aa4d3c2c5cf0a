import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from hyperslab.testing import RankError, on_ranks

GIVEN = """
import os
import pytest
from hyperslab.testing import on_ranks

@on_ranks(1, 3)
@pytest.mark.parametrize("n", [5, 6])
def test_above(n): ...

@pytest.mark.gpu
@pytest.mark.parametrize("n", [5])
@on_ranks(2)
def test_below(n): ...

@on_ranks(2)
def test_that_fails():
    left = int(os.environ["RANK"])
    assert left == 0, "not so"
"""


@on_ranks(1, 2, 4)
def test_the_body_runs_on_as_many_ranks():
    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == dist.get_world_size() == int(os.environ["WORLD_SIZE"])


@on_ranks(2, timeout_seconds=200)
@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_parametrize_may_stand_below(width, dtype):
    assert torch.ones(width, dtype=dtype).sum().item() == width
    assert width in (3, 4)


@pytest.mark.parametrize("width", [3, 4])
@on_ranks(2)
def test_parametrize_may_stand_above(width):
    assert width in (3, 4)


@on_ranks(1, 2)
def test_the_body_may_ask_for_the_number_of_ranks(num_ranks):
    assert num_ranks == int(os.environ["WORLD_SIZE"])


@on_ranks(2)
def test_the_value_of_a_fixture_arrives_as_a_copy(tmp_path):
    assert tmp_path.is_dir()


@on_ranks(2)
@torch.no_grad()
def test_decorators_of_the_body_are_kept():
    assert not torch.is_grad_enabled()


@on_ranks(2)
def raise_on_rank_1():
    assert os.environ["RANK"] == "0", "rank 1 has its doubts"


def test_a_failing_body_names_the_rank():
    with pytest.raises(RankError, match=r"^rank 1 of 2 raised .*: rank 1 has its doubts"):
        raise_on_rank_1(num_ranks=2)


def test_a_method_is_refused():
    with pytest.raises(TypeError, match=r"Case.test_it must be at the top level of its module"):

        class Case:
            @on_ranks(2)
            def test_it(self): ...


@pytest.mark.gpu
@on_ranks(1, 2)
def test_ranks_may_use_cuda():
    assert torch.ones(2, device="cuda").sum().item() == 2


@pytest.mark.slow
def test_pytest_shows_ids_marks_and_a_short_failure(torch_free):
    file = torch_free / "test_given.py"
    file.write_text(GIVEN)
    options = ["-v", "-p", "no:cacheprovider", "-m", "not gpu", "--import-mode=importlib"]
    options += ["-o", "markers=gpu: needs one"]
    command = [sys.executable, "-m", "pytest", *options, str(file)]
    shown = subprocess.run(
        command, cwd=torch_free, capture_output=True, text=True, check=False
    ).stdout
    for passed in ("[5-1ranks]", "[6-1ranks]", "[5-3ranks]", "[6-3ranks]"):
        assert f"test_above{passed} PASSED" in shown
    assert "test_that_fails[2ranks] FAILED" in shown
    assert "test_below" not in shown
    assert "RankError: rank 1 of 2 raised AssertionError: not so" in shown
    assert "on_ranks.py" not in shown
    assert "rank_processes.py" not in shown
    assert "4 passed, 1 deselected" in shown.replace("1 failed, ", "")
