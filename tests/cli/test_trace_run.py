import os
import shutil
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from hyperslab.cli.main import main
from hyperslab.trace import load_trace

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(b"x" * 50_000)
    return path


def trace_run(*arguments):
    return CliRunner().invoke(main, ["trace", "run", *map(str, arguments)])


def test_the_exit_code_is_that_of_the_program(tmp_path, data):
    program = f"open({str(data)!r}, 'rb').read(); raise SystemExit(7)"
    result = trace_run("-o", tmp_path / "traced", "--", sys.executable, "-Ic", program)
    assert result.exit_code == 7
    assert "1 processes were recorded; see: hyperslab trace report" in result.stderr
    assert len(load_trace(tmp_path / "traced")) >= 3
    assert trace_run("-o", tmp_path / "b", "--", "sh", "-c", "kill -TERM $$").exit_code == 143


def test_what_was_not_recorded_is_told(tmp_path, data):
    result = trace_run("-o", tmp_path / "a", "true")
    assert "nothing was recorded: no data file was read" in result.stderr
    assert "env did not load the recorder" not in result.stderr
    result = trace_run("-o", tmp_path / "b", "--", "no-such-program")
    assert result.exit_code == 127
    assert "there is no program 'no-such-program'" in result.stderr
    result = trace_run("-o", tmp_path / "b", "--", data)
    assert result.exit_code == 126
    assert f"Error: {data} cannot be run: it is not executable" in result.stderr
    assert trace_run("-o", tmp_path / "c").exit_code == 2


def test_an_interrupt_is_told_as_shells_tell_it(tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("hyperslab.trace.foreign.run_program.run_program", interrupted)
    assert trace_run("-o", tmp_path / "a", "true").exit_code == 130
    result = trace_run("-o", tmp_path / "b", "sh", "-c", "kill -INT $$")
    assert result.exit_code == 130


def test_options_of_the_program_are_its_own(tmp_path, data):
    result = trace_run("-o", tmp_path / "traced", "tail", "--bytes", "10", data)
    assert result.exit_code == 0
    assert load_trace(tmp_path / "traced").processes[0].program == f"tail --bytes 10 {data}"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_signals_are_handed_on(tmp_path, data, name):
    number = getattr(signal, name)
    program = f"""
import os, signal, sys
signal.signal({int(number)}, lambda *_: os._exit(9))
open({str(data)!r}, "rb").read()
print("ready", flush=True)
while True:
    signal.pause()
"""
    command = [sys.executable, "-m", "hyperslab", "trace", "run", "-o", str(tmp_path / "traced")]
    with subprocess.Popen(
        [*command, "--", sys.executable, "-Ic", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, number)
        assert process.wait(60) == 9
    assert len(load_trace(tmp_path / "traced")) >= 3


def test_a_killed_wrapper_loses_nothing(tmp_path, data):
    program = f"""
import sys
open({str(data)!r}, "rb").read()
print("ready", flush=True)
sys.stdin.read()
open({str(data)!r}, "rb").read()
print("done", flush=True)
"""
    command = [sys.executable, "-m", "hyperslab", "trace", "run", "-o", str(tmp_path / "traced")]
    with subprocess.Popen(
        [*command, "--", sys.executable, "-Ic", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        before = len(load_trace(tmp_path / "traced"))
        process.kill()
        process.wait(60)
        process.stdin.close()
        assert process.stdout.readline() == "done\n"
    assert len(load_trace(tmp_path / "traced")) > before >= 3


def test_ranks_of_a_launcher_share_a_folder(tmp_path, data):
    for rank in ("0", "1"):
        result = CliRunner().invoke(
            main,
            ["trace", "run", "-o", str(tmp_path / "traced"), "cat", str(data)],
            env={"RANK": rank},
        )
        assert result.exit_code == 0, result.output
    processes = load_trace(tmp_path / "traced").processes
    assert [process.rank for process in processes] == [0, 1]
