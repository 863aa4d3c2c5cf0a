"""What ``darshan-parser`` and ``darshan-dxt-parser`` print of a Darshan log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hyperslab.trace.file import FileContent
from hyperslab.trace.foreign.spans import ImportedProcess, nanoseconds
from hyperslab.trace.foreign.texts import TextFile
from hyperslab.trace.span import Category, Flag, Tier

_FIRST = "# darshan log version:"
_DXT = re.compile(r"^# DXT, |^ ?X_(POSIX|MPIIO)\s", re.M)
_SECOND = 1_000_000_000


def is_darshan(start: str) -> bool:
    return any(line.startswith(_FIRST) for line in start.split("\n")[:20])


def read_darshan(file: TextFile) -> list[FileContent]:
    """A content for each rank."""
    log = _Log(file)
    is_dxt = bool(_DXT.search(file.start(1 << 20)))
    for line in file.lines():
        if line.startswith("#"):
            log.read_comment(line)
        elif line.strip():
            try:
                log.read_access(line) if is_dxt else log.read_counter(line)
            except (ValueError, IndexError):
                log.num_wrong += 1
    if not is_dxt:
        log.add_counters()
    return log.contents()


class _Log:
    """What the lines so far told. Times are relative to ``start``, in Unix seconds."""

    def __init__(self, file: TextFile) -> None:
        self.num_wrong = 0
        self._file = file
        self._about: dict[str, str] = {}
        self._name = self._host = ""
        self._columns: list[str] = []
        self._ranks: dict[int, ImportedProcess] = {}
        self._has_shared = False
        self._records: dict[tuple[str, int, str], dict[str, str]] = {}

    def read_comment(self, line: str) -> None:
        if line.startswith("# DXT,"):
            for field, value in _dxt_fields(line):
                if field == "file_name":
                    self._name = value
                elif field == "hostname":
                    self._host = value
        elif line.startswith("# Module") and "Wt/Rd" in line:
            self._columns = line[1:].replace("[OST]", "").split()
        elif ": " in line:
            field, _, value = line[1:].partition(": ")
            self._about.setdefault(field.strip(), value.strip())

    # darshan-dxt-parser: a line is an access

    def read_access(self, line: str) -> None:
        fields = dict(zip(self._columns, line.split(), strict=False))
        module, is_read = fields.get("Module", ""), fields.get("Wt/Rd") == "read"
        missing = {"Rank", "Length", "Start(s)", "End(s)"} - fields.keys()
        if missing or fields.get("Wt/Rd") not in ("read", "write"):
            raise ValueError("not an access")
        start, stop = self._time(fields["Start(s)"]), self._time(fields["End(s)"])
        # MPI-IO's accesses consist of POSIX ones.
        counts = is_read and module != "X_MPIIO"
        self._rank(fields["Rank"]).add(
            Category.read if counts else Category.other,
            self._name,
            start,
            stop - start,
            thread=int(fields.get("Thread", 0)) if fields.get("Thread", "0").isdecimal() else 0,
            nbytes=int(fields["Length"]),
            layer=f"{module} {fields['Wt/Rd']}",
            tier=Tier.file if counts else Tier.none,
        )

    # darshan-parser: a line is a counter of a file and a rank

    def read_counter(self, line: str) -> None:
        module, rank, _, counter, value, name, *_ = line.split("\t")
        if module in ("POSIX", "STDIO"):
            int(rank)
            self._records.setdefault((module, int(rank), name), {})[counter] = value

    def add_counters(self) -> None:
        """Of each file and rank one span, of the time of all of its reads together."""
        num = 0
        for (module, rank, name), counters in self._records.items():
            try:
                num += self._add_record(module, str(rank), name, counters)
            except ValueError:
                self.num_wrong += 1
        if num:
            self._file.notes.append(
                f"{self._file.path} counts, and does not tell single reads: each span is the time "
                "of all reads of a file by a rank, from the first on; darshan-dxt-parser tells more"
            )

    def _add_record(self, module: str, rank: str, name: str, counters: dict[str, str]) -> bool:
        def told(counter: str) -> str:
            return counters.get(f"{module}_{counter}", "0")

        nbytes, seconds = int(told("BYTES_READ")), told("F_READ_TIME")
        opening = told("F_META_TIME")
        if not nbytes and float(seconds) <= 0:
            return False
        process = self._rank(rank)
        for category_flags, first, spent, amount, layer in (
            (Flag.opening, "F_OPEN_START_TIMESTAMP", opening, 0, "open, stat, seek, close"),
            (Flag(0), "F_READ_START_TIMESTAMP", seconds, nbytes, "all reads"),
        ):
            process.add(
                Category.read,
                name,
                self._time(told(first)),
                nanoseconds(spent, _SECOND),
                nbytes=amount,
                layer=f"{module} {layer}",
                tier=Tier.file,
                flags=category_flags,
            )
        return True

    # All of it

    def _time(self, seconds: str) -> int:
        start = self._about.get("start_time", "0")
        return nanoseconds(seconds, _SECOND, nanoseconds(start, _SECOND))

    def _rank(self, text: str) -> ImportedProcess:
        rank = int(text)
        self._has_shared |= rank < 0
        found = self._ranks.get(rank)
        if found is None:
            found = self._ranks[rank] = ImportedProcess(rank=max(rank, 0), host=self._host)
        return found

    def contents(self) -> list[FileContent]:
        notes = self._file.notes
        if self.num_wrong:
            notes.append(
                f"{self._file.path} has {self.num_wrong} lines that cannot be understood: left out"
            )
        if self._has_shared:
            notes.append(
                f"{self._file.path} tells of files that all ranks read only their sums over ranks: "
                "they are shown as rank 0"
            )
        # Darshan makes times of all ranks relative to one start.
        clock: dict[str, Any] = {"clock": f"{self._file.path}", "clocks": [[0, 0]]}
        clock["program"] = self._about.get("exe", "")
        for process in self._ranks.values():
            process.facts |= clock
        return [each.content(self._file.path) for each in self._ranks.values()]


def _dxt_fields(line: str) -> Iterator[tuple[str, str]]:
    """``# DXT, file_id: 1, file_name: /data/a, b.h5``: a name may hold commas."""
    for field in ("file_name", "hostname"):
        if found := re.search(rf"\b{field}: (.*)$", line):
            yield field, found[1].strip()
