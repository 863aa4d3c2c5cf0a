"""What the caller, the server and the ranks say to each other."""

import functools
import importlib
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

# Functions named by file and qualified name, so that another process can find them

BODY = "__on_ranks_body__"
"""The attribute by which a test made by ``on_ranks`` keeps the function it was made from."""


@dataclass(frozen=True, slots=True)
class FunctionRef:
    """A module-level function of the file ``path``, which is None for a built-in module."""

    module: str
    qualname: str
    path: str | None

    def load(self) -> Callable[..., Any]:
        return _look_up(load_module(self.module, self.path), self.qualname)


def refer_to(function: Callable[..., Any]) -> FunctionRef:
    """The reference that leads to ``function`` in a process that loads the same files."""
    name = getattr(function, "__qualname__", repr(function))
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    try:
        found = _look_up(module, name)
    except AttributeError:
        found = None
    if module is None or found is not function:
        raise TypeError(f"ranks cannot find {name}: pass a function from the top level of a module")
    path = getattr(module, "__file__", None)
    if path is None and module.__name__ == "__main__":
        raise TypeError(
            f"ranks cannot find {name}: write it to a file, as they cannot see a prompt"
        )
    return FunctionRef(module.__name__, name, path and str(Path(path).resolve()))


@functools.cache
def load_module(name: str, path: str | None) -> ModuleType:
    """The module that the caller knows as ``name``.

    pytest's importlib mode names test files as it likes, so a file that cannot be imported by
    name is loaded from ``path`` and then takes that name, for pickle to find its classes.
    """
    if path is None or _found_by_name(name, path):
        return importlib.import_module(name)
    # multiprocessing, too, calls a caller's script __mp_main__, and lets the caller know it so.
    spec = importlib.util.spec_from_file_location(name.replace("__main__", "__mp_main__"), path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    _add_parents(name, Path(path))
    sys.modules[name] = sys.modules[spec.name] = module
    _loading.append(path)
    try:
        spec.loader.exec_module(module)
    finally:
        _loading.pop()
    return module


_loading: list[str] = []
"""The caller's files that are being loaded, by a process that serves it."""


def check_not_loading() -> None:
    """Raises in a file whose top level would start processes, each of which loads the file."""
    if _loading:
        raise RuntimeError(
            f"{_loading[-1]} makes a team of ranks when it is loaded, and ranks load it: put that "
            "under if __name__ == '__main__':"
        )


def _found_by_name(name: str, path: str) -> bool:
    if name in sys.modules:
        found = getattr(sys.modules[name], "__file__", None)
    else:
        try:
            spec = importlib.util.find_spec(name)
        except ImportError:  # of a package that name lies in
            return False
        found = spec and spec.origin
    return found is not None and str(Path(found).resolve()) == path


def _add_parents(name: str, path: Path) -> None:
    """Name the folders above ``path`` as packages, so that test files can import each other."""
    while "." in name and path.parent.name:
        name, path = name.rpartition(".")[0], path.parent
        if name not in sys.modules:
            package = sys.modules[name] = ModuleType(name)
            package.__path__ = [str(path)]


def _look_up(module: ModuleType | None, qualname: str) -> Callable[..., Any]:
    found: Any = functools.reduce(getattr, qualname.split("."), module)
    return getattr(found, BODY, found)  # type: ignore[no-any-return]


# The caller's warning filters, for the ranks: what is an error in a test is one in its ranks


@dataclass(frozen=True, slots=True)
class WarningFilter:
    action: Any
    message: str
    category_module: str
    category_name: str
    module: str
    line: int

    @property
    def category(self) -> Any:
        """The warning class, or None where its module is not loaded: nobody can warn with it."""
        return getattr(sys.modules.get(self.category_module), self.category_name, None)


def current_filters() -> tuple[WarningFilter, ...]:
    filters: Iterable[tuple[Any, ...]] = warnings.filters
    return tuple(
        WarningFilter(
            action, _text(message), category.__module__, category.__name__, _text(module), line
        )
        for action, message, category, module, line in filters
    )


def install_filters(filters: Iterable[WarningFilter]) -> None:
    """Replace this process's filters by ``filters``, of which the first that fits counts."""
    warnings.resetwarnings()
    for each in reversed(tuple(filters)):
        if each.category is not None:
            warnings.filterwarnings(
                each.action, each.message, each.category, each.module, each.line
            )


def _text(pattern: re.Pattern[str] | str | None) -> str:
    return pattern.pattern if isinstance(pattern, re.Pattern) else pattern or ""


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
