import subprocess
import sys
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from hyperslab.cli.main import COMMANDS, main
from hyperslab.errors import LayoutError


@pytest.fixture
def fail(monkeypatch):
    """A command ``hyperslab fail`` that raises an error of two lines."""

    @click.command()
    def fail():
        raise LayoutError("cannot split an extent of 2\n  over 4 ranks")

    monkeypatch.setitem(COMMANDS, "fail", "made_up_module")
    monkeypatch.setitem(sys.modules, "made_up_module", SimpleNamespace(fail=fail))


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["doctor", "--help"]])
def test_help_and_version_load_no_torch(arguments):
    program = (
        "import sys\n"
        "from hyperslab.cli.main import main\n"
        f"main({arguments}, standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_each_help_has_examples(arguments):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0
    assert "Examples:\n" in result.output


def test_an_error_raised_on_purpose_is_one_line_on_stderr(fail):
    result = CliRunner().invoke(main, ["fail"])
    assert result.exit_code == 1
    assert result.stderr == "Error: cannot split an extent of 2 over 4 ranks\n"
    assert result.stdout == ""


def test_traceback_lets_the_error_through(fail):
    result = CliRunner().invoke(main, ["--traceback", "fail"])
    assert result.exit_code == 1
    assert isinstance(result.exception, LayoutError)


@pytest.mark.parametrize("arguments", [["no-such-command"], ["doctor", "--no-such-option"]])
def test_wrong_usage_exits_with_2(arguments):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "No such" in result.stderr


def test_python_m_hyperslab_is_the_same_command():
    command = [sys.executable, "-m", "hyperslab", "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.startswith("hyperslab "), done.stderr
