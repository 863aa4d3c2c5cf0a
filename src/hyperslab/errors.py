"""Every error that hyperslab raises on purpose, and the words that many of them share."""

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches


class HyperslabError(Exception):
    """The root of all errors raised on purpose; catch it to catch them all."""


class LayoutError(HyperslabError, ValueError):
    """A shape, a cut or a mesh that does not fit the tensor it is meant for."""


class ConfigError(HyperslabError, ValueError):
    """A setting or an argument that cannot be used as given."""


class FormatError(HyperslabError, ValueError):
    """A file that is missing, damaged, or not what it was opened as."""


class CommError(HyperslabError, RuntimeError):
    """Ranks that disagree, or a rank that can no longer be reached."""


class UnsupportedOp(HyperslabError, NotImplementedError):  # noqa: N818 - a public name
    """A torch function that has no exact rule for a split tensor."""


MAX_LISTED = 8
"""Names in one message."""


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raises unless ``value`` of the setting ``name`` is one of ``choices``."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def did_you_mean(wrong: str, known: Iterable[str], lead: str = "", cutoff: float = 0.6) -> str:
    """A question after the nearest of ``known``, behind ``lead``; nothing if none is near.

    >>> did_you_mean("adamm", ["sgd", "adam"], "; ")
    "; did you mean 'adam'?"
    """
    near = get_close_matches(wrong, list(known), 1, cutoff)
    return f"{lead}did you mean {near[0]!r}?" if near else ""


def listed(words: Sequence[str]) -> str:
    """The first few of them, and how many more there are."""
    more = f" and {len(words) - MAX_LISTED} more" if len(words) > MAX_LISTED else ""
    return ", ".join(words[:MAX_LISTED]) + more
