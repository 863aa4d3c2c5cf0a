import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import Counter

import numpy as np
import pytest

from hyperslab.errors import ConfigError
from hyperslab.trace import Category, Flag, load_trace, report
from hyperslab.trace.foreign import run_program as module
from hyperslab.trace.foreign.convert import import_traces
from hyperslab.trace.foreign.run_program import run_program

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(range(256)) * 400)
    return path


@pytest.fixture
def python(tmp_path):
    """Runs a Python program under the recorder, in the folder of the data."""

    def run(program, folder="traced", **options):
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(program))
        command = [sys.executable, "-I", str(path)]
        ran = run_program(command, tmp_path / folder, **options)
        assert ran.was_seen
        return ran

    return run


def calls(folder):
    """(process, what, file, bytes) of every span."""
    trace = load_trace(folder)
    return [
        (
            trace.processes[span["process"]].pid,
            trace.strings[span["layer"]],
            os.path.basename(trace.strings[span["name"]]),  # noqa: PTH119 - a string
            int(span["nbytes"]),
        )
        for span in trace.spans
        if trace.strings[span["name"]] != "program"
    ]


def without_process(found):
    """Short calls that follow each other are one, however long ago the one before was."""
    told = []
    for _, call, file, nbytes in found:
        if told and told[-1][:2] == (call, file) and 0 < nbytes < 4096 > told[-1][2] > 0:
            told[-1] = (call, file, told[-1][2] + nbytes)
        else:
            told.append((call, file, nbytes))
    return told


C_PROGRAM = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
#include <unistd.h>
static int number;
static void told(long result) { printf("%d %ld %d\n", ++number, result, errno); errno = number; }
int main(int count, char **words) {
    char buffer[8192], *line = NULL; size_t size = 0;
    struct iovec parts[2] = {{buffer, 100}, {buffer + 100, 200}};
    int file = open(words[1], O_RDONLY);
    told(file);
    told(read(file, buffer, 5000)); told(pread(file, buffer, 6000, 10));
    told(readv(file, parts, 2));
    told(preadv(file, parts, 2, 5)); told(preadv2(file, parts, 2, 5, 0));
    told(read(file, NULL, 100)); told(read(99, buffer, 1)); told(pread(file, buffer, 8, -5));
    told(lseek(file, 0, SEEK_CUR));
    void *mapped = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, file, 0);
    told(mapped != MAP_FAILED);
    int out = open("out.bin", O_RDWR | O_CREAT | O_TRUNC, 0600);
    off_t offset = 0;
    told(sendfile(out, file, &offset, 7000)); told(pread(out, buffer, 4500, 0));
    told(dup2(out, file)); told(pread(file, buffer, 4600, 0));
    told(close(file)); told(close(file)); told(close(out));
    told(open("/does/not/exist", O_RDONLY)); told(openat(AT_FDCWD, words[1], O_WRONLY));
    FILE *stream = fopen(words[1], "rb");
    told(fread(buffer, 2, 2600, stream)); told(fread(buffer, 1, 10, stream));
    told(fgets(buffer, 20, stream) != NULL); told(getline(&line, &size, stream) > 0);
    told(ftell(stream)); told(fclose(stream)); told(fopen("/does/not/exist", "r") == NULL);
    told(fread(buffer, 1, 1, stdin)); told(feof(stdin));
    return 3;
}
"""


def test_calls_of_c_programs_are_recorded_and_their_results_and_errors_stay(tmp_path, data, capfd):
    (tmp_path / "program.c").write_text(C_PROGRAM)
    program = tmp_path / "program"
    subprocess.run(["cc", "-w", "-o", program, tmp_path / "program.c"], check=True)
    command = [str(program), str(data)]
    plain = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    null = os.open(os.devnull, os.O_RDONLY)
    keep = os.dup(0)
    try:
        os.dup2(null, 0)
        ran = run_program(command, tmp_path / "traced")
    finally:
        os.dup2(keep, 0)
        os.close(keep), os.close(null)
    assert ran.exit_code == 3 == plain.returncode
    assert capfd.readouterr().out == plain.stdout.decode()
    assert without_process(calls(tmp_path / "traced")) == [
        ("open", "data.bin", 0),
        ("read", "data.bin", 5000),
        ("pread", "data.bin", 6000),
        ("readv", "data.bin", 300),
        ("preadv", "data.bin", 600),  # two short ones together
        ("read", "data.bin", 0),
        ("pread", "data.bin", 0),
        ("mmap", "data.bin", 0),
        ("sendfile", "data.bin", 7000),
        ("pread", "out.bin", 4500),
        ("pread", "out.bin", 4600),
        ("close", "out.bin", 0),
        ("close", "out.bin", 0),
        ("fopen", "data.bin", 0),
        ("fread", "data.bin", 5200),
        ("fread", "data.bin", 10),
        ("fgets", "data.bin", 19),
        ("getline", "data.bin", 158),
        ("fclose", "data.bin", 0),
    ]
    [note] = load_trace(tmp_path / "traced").notes
    assert "data.bin into memory" in note


def test_threads_starts_and_durations_are_told(tmp_path, data, python):
    python(
        f"""
        import threading, time
        def read():
            with open({str(data)!r}, "rb", buffering=0) as file:
                file.read(50_000)
                time.sleep(0.05)
                file.read(50_000)
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        read()
        """
    )
    trace = load_trace(tmp_path / "traced")
    [process] = trace.processes
    assert process.program.endswith("program.py")
    reads = trace.spans[trace.spans["nbytes"] > 0]
    assert [trace.threads[each].tid == process.pid for each in reads["thread"]] == [
        *(False, False),
        *(True, True),
    ]
    # The main program waits for what its main thread reads.
    exposed = (reads["flags"] & Flag.exposed) > 0
    assert exposed.tolist() == [False, False, True, True]
    assert (reads["category"] == Category.read).all()
    assert (reads["duration"] > 0).all()
    assert (np.diff(reads["start"])[::2] >= 50_000_000).all()
    at = os.stat(tmp_path / "program.py").st_mtime_ns  # noqa: PTH116
    assert 0 <= reads["start"][0] - at < 600 * 10**9


def test_processes_that_are_forked_and_started_write_files_of_their_own(tmp_path, data, python):
    python(
        f"""
        import os, subprocess, sys
        file = os.open({str(data)!r}, os.O_RDONLY)
        os.read(file, 5000)
        if not (child := os.fork()):
            os.read(file, 6000)  # what its parent had opened
            os._exit(0)
        os.waitpid(child, 0)
        subprocess.run(["cat", {str(data)!r}], stdout=subprocess.DEVNULL, check=True)
        os.read(file, 7000)
        os.execv(sys.executable, [sys.executable, "-Ic", "open({str(data)!r}, 'rb').read(8000)"])
        """
    )
    found = calls(tmp_path / "traced")
    numbers = Counter(pid for pid, *_ in found)
    assert len(numbers) == 3
    main = found[0][0]
    told = [each[1:] for each in found if each[0] == main]
    assert (
        [each for each in told if each[0] in ("open", "read")]
        == [
            ("open", "data.bin", 0),
            ("read", "data.bin", 5000),
            ("read", "data.bin", 7000),
            ("open", "data.bin", 0),  # after exec, in a file of its own
            *[("read", "data.bin", nbytes) for _, _, nbytes in told[4:-1]],
        ]
    )
    assert sum(nbytes for *_, nbytes in told) >= 5000 + 7000 + 8000
    assert len(list((tmp_path / "traced").glob(f"*-{main}-*"))) == 2
    others = [each[1:] for each in found if each[0] != main]
    assert others[0] == ("read", "data.bin", 6000)
    assert sum(nbytes for call, _, nbytes in others[1:]) == 102_400


def test_nobody_is_said_to_wait_for_what_forked_workers_read(tmp_path, data, python):
    python(
        f"""
        import os
        if not (child := os.fork()):
            open({str(data)!r}, "rb").read()
            os._exit(0)
        os.waitpid(child, 0)
        """
    )
    trace = load_trace(tmp_path / "traced")
    assert len(trace) > 0
    assert not (trace.spans["flags"] & Flag.exposed).any()
    assert trace.notes == ["1 processes read for others: nothing tells whether these waited for it"]


@pytest.mark.slow
def test_workers_of_a_data_loader_are_recorded(tmp_path, python):
    python(
        """
        import h5py, numpy as np, torch
        from torch.utils.data import DataLoader, Dataset

        class Rows(Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, i):
                with h5py.File("rows.h5") as file:
                    return torch.from_numpy(file["x"][i])

        def main():
            import os
            os.chdir(os.path.dirname(__file__))
            with h5py.File("rows.h5", "w") as file:
                file["x"] = np.arange(80_000.0).reshape(8, 10_000)
            rows = torch.cat(list(DataLoader(Rows(), batch_size=2, num_workers=2)))
            assert rows.sum() == sum(range(80_000))

        main()
        """
    )
    trace = load_trace(tmp_path / "traced")
    reads = trace.spans[trace.spans["nbytes"] >= 80_000]
    assert len(reads) == 8
    assert set(reads["nbytes"]) == {80_000}
    assert {os.path.basename(trace.strings[i]) for i in reads["name"]} == {"rows.h5"}  # noqa: PTH119
    assert len(np.unique(reads["process"])) == 2
    # Somebody else waits for what workers read, or nobody.
    assert not (reads["flags"] & Flag.exposed).any()


def test_reads_of_h5py_are_recorded(tmp_path, python):
    python(
        f"""
        import h5py, os
        os.chdir({str(tmp_path)!r})
        with h5py.File("x.h5", "w") as file:
            file["x"] = range(10_000)
            file.create_dataset("y", data=range(10_000), chunks=(2000,), compression="gzip")
        with h5py.File("x.h5") as file:
            assert file["x"][5000:].sum() + file["y"][...].sum() == 37_497_500 + 49_995_000
        """
    )
    found = without_process(calls(tmp_path / "traced"))
    assert ("open", "x.h5", 0) in found
    assert ("pread", "x.h5", 40_000) in found
    assert len([nbytes for _, _, nbytes in found if 0 < nbytes < 10_000]) >= 1
    assert found[-1] == ("close", "x.h5", 0)


def test_ranks_are_those_of_the_launcher(tmp_path, data, python):
    python(
        f"""
        import os, subprocess, sys
        read = "open({str(data)!r}, 'rb').read()"
        for name in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK"):
            for rank in ("2", "1"):
                variables = {{**os.environ, name: rank}}
                subprocess.run([sys.executable, "-Ic", read], env=variables, check=True)
        """
    )
    assert [process.rank for process in load_trace(tmp_path / "traced").processes] == [
        *([1] * 4),
        *([2] * 4),
    ]


def test_what_a_killed_process_read_is_in_its_file(tmp_path, data, python):
    ran = python(
        f"""
        import os, signal
        file = os.open({str(data)!r}, os.O_RDONLY)
        for _ in range(20_000):  # more than one segment of its file
            os.pread(file, 5000, 0)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert ran.exit_code == 128 + signal.SIGKILL
    found = calls(tmp_path / "traced")
    assert len(found) == 20_001
    assert sum(nbytes for *_, nbytes in found) == 20_000 * 5000


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_shares_are_of_the_whole_life_of_a_program_however_it_ends(tmp_path, data, python, end):
    python(
        f"""
        import os, signal, time
        time.sleep(0.3)
        open({str(data)!r}, "rb").read()
        time.sleep(0.3)
        {end}
        """
    )
    found = report(tmp_path / "traced").analysis.total
    assert found.seconds >= 0.6
    assert found.share(Category.read) < 0.5
    assert len(load_trace(tmp_path / "traced").processes) == 1


def test_an_imported_program_has_one_life(tmp_path, data):
    run_program(["cat", str(data)], tmp_path / "traced")
    import_traces([tmp_path / "traced"], tmp_path / "imported")
    again = load_trace(tmp_path / "imported")
    assert len(again.of(Category.other)) == 1
    assert len(again) == len(load_trace(tmp_path / "traced"))
    assert not any("ended is not known" in note for note in again.notes)


def test_without_the_end_of_a_program_its_last_record_counts(tmp_path, data, python):
    program = f"import time; time.sleep(0.1); open({str(data)!r}, 'rb').read(); time.sleep(0.1)"
    python(program)
    for life in (tmp_path / "traced").glob("program-*"):
        life.unlink()
    trace = load_trace(tmp_path / "traced")
    whole = trace.spans[trace.spans["category"] == Category.other]
    stops = trace.spans["start"] + trace.spans["duration"]
    assert whole["duration"].item() >= 0.1e9
    assert whole["start"].item() + whole["duration"].item() == stops.max()
    assert any("ended is not known" in note for note in trace.notes)


def test_threads_and_signal_handlers_lose_nothing(tmp_path, data, python):
    python(
        f"""
        import os, signal, threading
        file = os.open({str(data)!r}, os.O_RDONLY)
        signal.signal(signal.SIGALRM, lambda *_: os.pread(file, 4096, 0))
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        def read():
            for _ in range(5000):
                os.pread(file, 5000, 0)
        threads = [threading.Thread(target=read) for _ in range(4)]
        [each.start() for each in threads]
        [each.join() for each in threads]
        """
    )
    numbers = Counter(nbytes for *_, nbytes in calls(tmp_path / "traced"))
    assert numbers[5000] == 20_000


def test_programs_and_what_is_no_file_are_left_out(tmp_path, python):
    program = f"""
        import json, os, sqlite3, socket
        os.chdir({str(tmp_path)!r})
        open("module.py", "w").write("x = 1")
        os.makedirs("bin", exist_ok=True)
        open("bin/script", "w").write("x = 1")
        os.chmod("bin/script", 0o755)
        open("bin/script").read()
        open("module.py").read()
        open("/proc/self/status").read()
        open("/dev/zero", "rb").read(10)
        ends = os.pipe()
        os.write(ends[1], b"x")
        os.read(ends[0], 1)
        os.listdir(".")
        with open("only written", "w") as file:
            file.write("x")
        """
    assert python(program).num_files == 0
    assert python(program, "all", keep_all=True).num_files == 1
    names = {name for _, _, name, _ in calls(tmp_path / "all")}
    assert {"module.py", "status"} <= names
    assert not {"zero", "only written"} & names


def test_programs_that_cannot_be_recorded_are_told_of(tmp_path, data, python):
    (tmp_path / "empty.c").write_text("int main(void) { return 0; }")
    static = tmp_path / "static"
    made = subprocess.run(["cc", "-static", "-o", static, tmp_path / "empty.c"], check=False)
    if made.returncode:
        pytest.skip("no libc to link statically")
    ran = run_program([str(static)], tmp_path / "alone")
    assert ran == (0, 0, False)
    python(
        f"""
        import subprocess
        subprocess.run([{str(static)!r}], check=True)
        subprocess.run(["cat", {str(data)!r}], env={{"PATH": "/bin:/usr/bin"}},
                       stdout=subprocess.DEVNULL, check=True)
        """
    )
    [note] = load_trace(tmp_path / "traced").notes
    assert f"/cat, {static}, statically linked or without LD_PRELOAD" in note


def test_a_full_disk_ends_recording_and_not_the_program(tmp_path, data, python):
    limit = 600 << 10  # bytes of a file: a part of the second segment
    python(
        f"""
        import os, resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
        file = os.open({str(data)!r}, os.O_RDONLY)
        for _ in range(20_000):
            assert len(os.pread(file, 5000, 0)) == 5000
        """
    )
    trace = load_trace(tmp_path / "traced")
    assert 8000 < len(trace) < 8192
    assert "lacks" in trace.notes[0]
    assert "no room" in trace.notes[0]


# Before it runs


def test_without_a_compiler_one_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(ConfigError, match="there is no C compiler 'no-such-compiler'"):
        run_program(["true"], tmp_path)
    monkeypatch.setenv("CC", "false")
    with pytest.raises(ConfigError, match="false cannot compile the recorder"):
        run_program(["true"], tmp_path)


def test_programs_that_are_not_there_and_folders_with_another_run_are_refused(tmp_path, data):
    with pytest.raises(ConfigError, match="there is no program 'no-such-program'") as told:
        run_program(["no-such-program"], tmp_path / "traced")
    assert told.value.exit_code == 127
    with pytest.raises(ConfigError, match="is not executable: chmod") as told:
        run_program([str(data)], tmp_path / "traced")
    assert told.value.exit_code == 126
    run_program(["cat", str(data)], tmp_path / "traced")
    with pytest.raises(ConfigError, match="has 2 trace files of another run"):
        run_program(["cat", str(data)], tmp_path / "traced")


def test_a_folder_that_cannot_be_told_to_the_system_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a b"))
    with pytest.raises(ConfigError, match="has a space or a colon in its name"):
        run_program(["true"], tmp_path)


def test_the_recorder_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = module.build_recorder()
    at = made.stat().st_mtime_ns
    assert module.build_recorder() == made
    assert made.stat().st_mtime_ns == at
    assert [path.name for path in made.parent.iterdir()] == [made.name]
