"""Checks what the sdist and the wheel of a folder contain: python contents.py dist."""

import sys
import tarfile
import zipfile
from pathlib import Path

SOURCE = Path("src")
IN_SDIST = {
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "constraints.txt",
    "tests/conftest.py",
}


def main() -> None:
    """Exits with a line for everything that is missing or too much."""
    folder = Path(sys.argv[1])
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    package = {
        path.relative_to(SOURCE).as_posix()
        for path in (SOURCE / "hyperslab").rglob("*")
        if path.suffix in (".c", ".css", ".js", ".json", ".py", ".toml", ".typed")
    }
    lost = [f"{wheel.name} has no {name}" for name in package - in_wheel]
    lost += [f"{sdist.name} has no {name}" for name in IN_SDIST - in_sdist]
    if not any(name.endswith("licenses/LICENSE") for name in in_wheel):
        lost.append(f"{wheel.name} has no LICENSE")
    extra = {name for name in in_wheel - package if ".dist-info/" not in name}
    sys.exit("\n".join(sorted(lost + [f"{wheel.name} has {name}" for name in extra])) or 0)


main()
