"""Runs any program under ``posix.c``, which records what it and its children read."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from hyperslab.errors import ConfigError
from hyperslab.partial import explained_writing, make_folder
from hyperslab.trace.file import SUFFIX
from hyperslab.trace.foreign.lives import write_life
from hyperslab.trace.launcher import rank_of_launcher

_log = logging.getLogger("hyperslab")

_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-U_FORTIFY_SOURCE")
_LIBRARIES = ("-ldl", "-lpthread")
_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGWINCH")
_FROM_THE_KERNEL = 128  # si_code of what a terminal sends to all of its foreground processes


class Ran(NamedTuple):
    """How a program ended, and what was recorded of it."""

    exit_code: int
    num_files: int
    was_seen: bool
    """Whether the recorder was loaded into any process."""


def run_program(command: Sequence[str], folder: Path, *, keep_all: bool = False) -> Ran:
    """Runs ``command``, and records what it and its children read to files in ``folder``.

    Signals are handed on to it. ``keep_all`` records every file, not only data.
    """
    program = _found(command[0])
    library = build_recorder()
    make_folder(folder)
    folder = folder.resolve()
    _check_is_new(folder)
    before = set(folder.glob(f"*{SUFFIX}"))
    seen = folder / f".seen-{os.getpid()}"
    variables = dict(os.environ)
    variables["LD_PRELOAD"] = " ".join([str(library), *variables.get("LD_PRELOAD", "").split()])
    variables |= {"HYPERSLAB_TRACE_FOLDER": str(folder), "HYPERSLAB_TRACE_SEEN": str(seen)}
    variables["HYPERSLAB_TRACE_ALL"] = str(int(keep_all))
    start = time.perf_counter_ns()
    try:
        exit_code = _run(program, command, variables)
        was_seen = seen.exists()
    finally:
        seen.unlink(missing_ok=True)
    num_files = len(set(folder.glob(f"*{SUFFIX}")) - before)
    if num_files:
        _tell_life(folder, command, (start, time.perf_counter_ns()))
    return Ran(exit_code, num_files, was_seen)


def _tell_life(folder: Path, command: Sequence[str], ran: tuple[int, int]) -> None:
    """The program has ended well, or not, by then: what is wrong with its trace is only said."""
    try:
        write_life(folder, command, ran)
    except OSError as error:
        _log.warning("%s does not tell when the program ended: %s", folder, error.strerror)


class NotStartedError(ConfigError):
    """There is no such program, or it cannot be run; ``exit_code`` is what shells have then."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def _found(name: str) -> str:
    program = shutil.which(name)
    if program is not None:
        return program
    there = Path(name) if os.sep in name else None
    if there is None or not there.exists():
        raise NotStartedError(f"there is no program {name!r}: give one as in a shell", 127)
    what = "is a folder" if there.is_dir() else "is not executable: chmod +x, or name what runs it"
    raise NotStartedError(f"{name} cannot be run: it {what}", 126)


def _check_is_new(folder: Path) -> None:
    """Ranks of a launcher share a folder; otherwise traces of two runs would be one."""
    there = list(folder.glob(f"*{SUFFIX}"))
    if there and rank_of_launcher(os.environ) is None:
        raise ConfigError(
            f"{folder} has {len(there)} trace files of another run: give another folder by -o, or "
            "remove them"
        )


def _run(program: str, command: Sequence[str], variables: Mapping[str, str]) -> int:
    """The exit code of ``command``, or 128 and the signal that ended it, as shells say it."""
    handed_on = {getattr(signal, name) for name in _FORWARDED if hasattr(signal, name)}
    awaited = {*handed_on, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    try:
        sys.stdout.flush()
        try:
            pid = os.posix_spawn(program, list(command), variables, setsigmask=before)
        except OSError as error:
            raise NotStartedError(f"{program} cannot be started: {error.strerror}", 126) from error
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            told = signal.sigwaitinfo(awaited)
            is_of_terminal = told.si_code == _FROM_THE_KERNEL and os.getpgid(pid) == os.getpgrp()
            if told.si_signo in handed_on and not is_of_terminal:
                os.kill(pid, told.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# The recorder


def build_recorder() -> Path:
    """The library to preload, which is compiled once for each host's libc."""
    if sys.platform != "linux":
        raise ConfigError("hyperslab trace run records on Linux only: it preloads a library")
    source = files("hyperslab.trace.foreign").joinpath("posix.c").read_bytes()
    compiler = os.environ.get("CC") or "cc"
    about = f"{_FLAGS} {compiler} {platform.machine()} {platform.libc_ver()}"
    key = hashlib.sha256(source + about.encode()).hexdigest()[:20]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hyperslab"
    library = cache / f"posix-{key}.so"
    if any(each in str(library) for each in " :"):
        raise ConfigError(
            f"{library} cannot be preloaded: its folder has a space or a colon in its name; set "
            "XDG_CACHE_HOME to one that has none"
        )
    if not library.exists():
        _compile(compiler, source, library)
    return library


def _compile(compiler: str, source: bytes, library: Path) -> None:
    if shutil.which(compiler.split()[0]) is None:
        raise ConfigError(
            f"hyperslab trace run compiles a small recorder once, and there is no C compiler "
            f"{compiler!r}: install one (gcc, clang), or name it by CC"
        )
    make_folder(library.parent)
    with explained_writing(library), tempfile.TemporaryDirectory(dir=library.parent) as place:
        made = Path(place) / library.name
        command = [*compiler.split(), *_FLAGS, "-o", str(made), "-x", "c", "-", *_LIBRARIES]
        done = subprocess.run(command, input=source, capture_output=True, check=False)
        if done.returncode:
            said = " ".join(done.stderr.decode(errors="replace").split())
            raise ConfigError(
                f"{compiler} cannot compile the recorder of hyperslab trace run: {said[:500]}"
            )
        made.replace(library)
