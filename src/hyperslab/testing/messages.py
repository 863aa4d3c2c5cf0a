"""What the caller, the server and the ranks say to each other."""

from dataclasses import dataclass
from pathlib import Path

from hyperslab.testing.function_ref import FunctionRef
from hyperslab.testing.warning_filters import WarningFilter


@dataclass(frozen=True, slots=True)
class Seat:
    """All that a rank is told when it is forked."""

    number: int
    """Names the process towards the server. Not a process id: the system uses those again."""

    rank: int
    folder: Path
    """Where the rank writes its output and its stacks."""

    environment: dict[str, str]
    working_folder: Path
    search_path: list[str]
    """The caller's ``sys.path``."""

    warm: list[str]
    """Modules that the server loads before it forks."""

    @property
    def output(self) -> Path:
        return self.folder / f"rank{self.rank}.output"

    @property
    def stacks(self) -> Path:
        return self.folder / f"rank{self.rank}.stacks"


@dataclass(frozen=True, slots=True)
class Signal:
    """Asks the server to send ``signum`` to the processes of these seats."""

    numbers: list[int]
    signum: int


@dataclass(frozen=True, slots=True)
class Exited:
    """Told by the server once for each process that it forked."""

    number: int
    exit_code: int
    """Negative for a signal, as in ``subprocess``."""


@dataclass(frozen=True, slots=True)
class Call:
    function: FunctionRef
    arguments: bytes
    """``(args, kwargs)``, pickled: they may need the function's module to be loaded first."""

    filters: tuple[WarningFilter, ...]


@dataclass(frozen=True, slots=True)
class Returned:
    result: bytes
    """Pickled, so that tensors travel by value."""


@dataclass(frozen=True, slots=True)
class Raised:
    when: float
    """On the monotonic clock, which all processes of a machine share."""

    summary: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Died:
    exit_code: int
    """Negative for a signal, as in ``subprocess``."""


Outcome = Returned | Raised | Died
