"""A mistake that someone could have made, as a value."""

from dataclasses import dataclass
from pathlib import Path


class StaleError(Exception):
    """The mutant does not fit the source any more."""


@dataclass(frozen=True)
class Mutant:
    """``file`` with ``old``, which occurs there once, replaced by ``new``."""

    file: str
    """Below ``src/hyperslab``."""
    old: str
    new: str
    tests: str
    """The files of its area that should notice, below ``tests``, with spaces between them."""
    wrong: str
    """What is wrong with it, in a few words."""

    @property
    def name(self) -> str:
        return f"{self.file}: {self.wrong}"

    @property
    def package(self) -> str:
        return self.file.split("/")[0]

    @property
    def test_paths(self) -> list[str]:
        return [f"tests/{path}" for path in self.tests.split()]

    def mutated(self, root: Path) -> str:
        """The text of the file below ``root``, a checkout, with the mistake in it."""
        path = root / "src/hyperslab" / self.file
        text = path.read_text() if path.exists() else ""
        if (count := text.count(self.old)) != 1:
            raise StaleError(
                f"{self.name}: {self.old!r} occurs {count} times in {self.file}, and should once: "
                "mend or replace this mutant"
            )
        return text.replace(self.old, self.new)

    def apply(self, root: Path) -> None:
        (root / "src/hyperslab" / self.file).write_text(self.mutated(root))
