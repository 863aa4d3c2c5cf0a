"""What the sdist and the wheel in a folder must have, and must not have: python contents.py dist."""

import sys
import tarfile
import zipfile
from pathlib import Path

SOURCE = Path("src")


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
        if path.suffix in (".py", ".toml", ".typed")
    }
    lost = [f"{wheel.name} has no {name}" for name in package - in_wheel]
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "tests/conftest.py", "constraints.txt"):
        if name not in in_sdist:
            lost.append(f"{sdist.name} has no {name}")
    if not any(name.endswith("licenses/LICENSE") for name in in_wheel):
        lost.append(f"{wheel.name} has no LICENSE")
    extra = {name for name in in_wheel - package if ".dist-info/" not in name}
    sys.exit("\n".join(sorted(lost + [f"{wheel.name} has {name}" for name in extra])) or 0)


main()
