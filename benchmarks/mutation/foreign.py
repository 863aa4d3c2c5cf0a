"""Mutants of what records and reads the traces of others, and of what writes ours for them."""

from mutation.mutant import Mutant

RUN = "trace/foreign/test_run_program.py"
IMPORTS = "trace/foreign/test_imports.py"

MUTANTS = [
    Mutant(
        "trace/foreign/lives.py",
        "    for of_rank in alive.values():\n",
        "    for of_rank in ():\n",
        RUN,
        "programs last as long as their reads",
    ),
    Mutant(
        "trace/foreign/csv_table.py",
        '_LINE_END = re.compile(r"\\r\\n|\\n|\\r")',
        '_LINE_END = re.compile(r"\\r\\n|\\n")',
        IMPORTS,
        "tables with the line ends of old systems are refused",
    ),
    Mutant(
        "trace/foreign/posix.c",
        "            madvise((void *)at, sizeof *state, MADV_WIPEONFORK);\n"
        "            state = (struct state *)at;\n"
        "            pthread_atfork(NULL, NULL, wipe);\n",
        "            state = (struct state *)at;\n",
        RUN,
        "forked processes write into the file of their parent",
    ),
    Mutant(
        "trace/foreign/posix.c",
        "write_call(READ, op, file, start, now(), (uint64_t)(nbytes));",
        "write_call(READ, op, file, start, now(), (uint64_t)(nbytes)); error = 0;",
        RUN,
        "programs lose the error of a read that failed",
    ),
    Mutant(
        "trace/foreign/posix.c",
        "    if (file == UNKNOWN || in_vfork_child())\n        return 0;\n    atomic_store",
        "    if (file == UNKNOWN || in_vfork_child())\n        return 0;\n    if (0) atomic_store",
        RUN,
        "a descriptor keeps the name of the file that it had before",
    ),
    Mutant(
        "trace/foreign/posix_file.py",
        '        if content.facts["forked"] or _who(content, "parent") in there:\n',
        '        if _who(content, "parent") in there:\n',
        RUN,
        "workers count as the main program, if that reads nothing itself",
    ),
    Mutant(
        "trace/foreign/run_program.py",
        "return code if code >= 0 else 128 - code",
        "return code if code >= 0 else 1",
        f"{RUN} cli/test_trace_run.py",
        "which signal ended a program is lost",
    ),
    Mutant(
        "trace/foreign/torch_profiler.py",
        "            if stop <= inside_until.get(event.thread, -1):",
        "            if stop < 0:",
        IMPORTS,
        "operators within others count twice",
    ),
    Mutant(
        "trace/foreign/darshan.py",
        '        counts = is_read and module != "X_MPIIO"\n',
        "        counts = is_read\n",
        IMPORTS,
        "bytes that MPI-IO reads by POSIX count twice",
    ),
    Mutant(
        "trace/export.py",
        "    return not stack or stop <= stack[-1]\n",
        "    return True\n",
        "trace/test_export.py",
        "spans that overlap share a track, where tools drop one",
    ),
]
