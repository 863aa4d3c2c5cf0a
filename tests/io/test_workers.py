import os
import signal
import subprocess
import sys
import time

PROGRAM = """
import sys, time
from pathlib import Path
from hyperslab.partial import partial_file
from hyperslab.io.workers import worker_processes

def write(path):
    with partial_file(Path(path)):
        time.sleep(1000)

if __name__ == "__main__":
    with worker_processes(1, []) as submit_all:
        submit_all(write, [sys.argv[1]])[0].result()
"""


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def test_a_process_ends_with_its_parent_and_removes_what_it_had_half_written(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run = subprocess.Popen([sys.executable, program, tmp_path / "x"], stderr=subprocess.DEVNULL)
    wait_for(lambda: list(tmp_path.glob(".x.*.part")))
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    wait_for(lambda: not list(tmp_path.glob(".x.*.part")))
