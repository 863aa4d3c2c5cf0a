"""Pages as a browser shows them: headless Chromium, where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_MESSAGE = re.compile(r'CONSOLE[^"]*"(.*)", source:')


class Shown(NamedTuple):
    """What came of a page."""

    dom: str
    """Where it was asked for."""
    console: list[str]
    """All that its scripts printed, errors among it."""


def browse(page: Path, *arguments: str) -> Shown:
    """Opens a page, its scripts' timers run ahead; with arguments such as ``--dump-dom``."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=900,1200"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=5000"]
    done = subprocess.run(
        [*command, *arguments, page.absolute().as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return Shown(done.stdout, _MESSAGE.findall(done.stderr))


def screenshot(page: Path, picture: Path, *, dark: bool) -> Shown:
    """Writes a PNG of a page, in one of its colour schemes."""
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    return browse(page, f"--screenshot={picture}", scheme)


def colours_of(path: Path) -> list[tuple[int, ...]]:
    """Those of every 97th pixel of an 8-bit PNG, which needs matplotlib."""
    from matplotlib.image import imread

    pixels = (imread(path)[..., :3] * 255).astype(int)
    return [tuple(each) for each in pixels.reshape(-1, 3)[::97].tolist()]


def brightness_of(path: Path) -> float:
    """The mean of all colours of a PNG, from 0 to 255."""
    colours = colours_of(path)
    return sum(map(sum, colours)) / len(colours) / 3
