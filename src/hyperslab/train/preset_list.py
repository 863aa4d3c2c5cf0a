"""The configurations that are shipped, and where their data may come from."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePath

from hyperslab.train.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A configuration that is shipped; its settings are in ``presets/NAME.toml``."""

    name: str
    about: str
    """What is learned, in a line."""

    shape: tuple[int, ...]
    """Of one sample: channels, then space."""

    num_parameters: int
    """Of the model."""

    gflop: float
    """Of its forward pass over one sample, two operations for a multiplication and addition."""

    schema: str
    """Of the data, one of ``hyperslab.io.PRESETS``."""

    synth: str
    """The arguments of ``hyperslab data synth`` that make such samples, but the folder."""

    @property
    def input(self) -> str:
        return "x".join(map(str, self.shape))


def _cosmoflow(size: int, gflop: float, count: int) -> Preset:
    return Preset(
        name=f"cosmoflow-{size}",
        about="four cosmological parameters, from cubes of matter",
        shape=(4, size, size, size),
        num_parameters=9_439_652,
        gflop=gflop,
        schema="cosmoflow",
        synth=f"cosmo --size {size} --count {count}",
    )


_PRESETS = (
    _cosmoflow(64, gflop=2.37, count=256),
    _cosmoflow(128, gflop=18.5, count=64),
    _cosmoflow(256, gflop=147.9, count=32),
    _cosmoflow(512, gflop=1183, count=16),
    Preset(
        name="hepcnn",
        about="signal or background, from images of a calorimeter",
        shape=(3, 224, 224),
        num_parameters=594_178,
        gflop=5.26,
        schema="hepcnn",
        synth="hep --count 4096 --per-file 512",
    ),
    Preset(
        name="climate",
        about="cyclones and atmospheric rivers, cell by cell in maps of weather",
        shape=(16, 768, 1152),
        num_parameters=4_813_827,
        gflop=320.6,
        schema="climate",
        synth="climate --count 32",
    ),
    Preset(
        name="mesh-1k",
        about="how much of each block of a mesh will tangle",
        shape=(18, 1024, 1024),
        num_parameters=34_288_128,
        gflop=2365,
        schema="mesh",
        synth="mesh --size 1024 --block 32 --count 64",
    ),
    Preset(
        name="mesh-2k",
        about="the same, at twice the resolution",
        shape=(18, 2048, 2048),
        num_parameters=11_863_808,
        gflop=1894,
        schema="mesh",
        synth="mesh --size 2048 --count 32",
    ),
    Preset(
        name="unet3d",
        about="organs and lesions, cell by cell in scanned volumes",
        shape=(1, 128, 128, 128),
        num_parameters=19_070_628,
        gflop=3908,
        schema="volumes",
        synth="volumes --size 128 --count 64",
    ),
    Preset(
        name="resnet50",
        about="the class of an image",
        shape=(3, 224, 224),
        num_parameters=23_528_522,
        gflop=8.17,
        schema="images",
        synth="images --size 224 --count 4096",
    ),
    Preset(
        name="autoencoder-wide",
        about="images again, after few numbers: matrices that ranks share",
        shape=(3, 256, 256),
        num_parameters=100_860_160,
        gflop=0.201,
        schema="images",
        synth="images --size 256 --count 1024",
    ),
    Preset(
        name="autoencoder-dense",
        about="images again, after few numbers, layer by layer and then all together",
        shape=(3, 64, 64),
        num_parameters=25_737_792,
        gflop=0.0514,
        schema="images",
        synth="images --size 64 --count 4096",
    ),
    Preset(
        name="autoencoder-conv",
        about="cubes of matter again, after a code, layer by layer and then all together",
        shape=(4, 64, 64, 64),
        num_parameters=336_036,
        gflop=1.342,
        schema="cosmoflow",
        synth="cosmo --size 64 --count 256",
    ),
    Preset(
        name="finetune",
        about="what few labels tell, by the encoder of an earlier run (finetune.run)",
        shape=(4, 64, 64, 64),
        num_parameters=336_036,
        gflop=1.342,
        schema="cosmoflow",
        synth="cosmo --size 64 --count 256",
    ),
)

PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _PRESETS}


def preset_text(name: str) -> str:
    """The TOML of a preset."""
    return (resources.files("hyperslab.train") / "presets" / f"{name}.toml").read_text("utf-8")


def hint_for(config: Config) -> str | None:
    """What to do when none of the data's files exist: the command that makes up such samples.

    None if nothing that makes samples up follows the schema of the data.
    """
    near = _nearest(config)
    if near is None:
        return None
    files = config.data.files
    first = files if isinstance(files, str) else next(iter(files), "")
    size = _size(config) or near.shape[-1]
    arguments = near.synth.replace(f"--size {near.shape[-1]}", f"--size {size}")
    folder = shlex.quote(str(PurePath(first).parent))
    return f"to make some up: hyperslab data synth {arguments} {folder}"


def _nearest(config: Config) -> Preset | None:
    """The preset with such data that is most like ``config``, or None."""
    size = _size(config) or 0
    return min(
        (preset for preset in PRESETS.values() if preset.schema == config.data.preset),
        key=lambda preset: (
            not preset.name.startswith(config.model.name),
            abs(preset.shape[-1] - size),
        ),
        default=None,
    )


def _size(config: Config) -> int | None:
    options = config.model.options
    size, inputs = options.get("size"), options.get("inputs")
    if isinstance(inputs, int):  # all numbers of an image of three channels
        size = math.isqrt(inputs // 3)
    return size if isinstance(size, int) else None
