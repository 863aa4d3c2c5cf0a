"""Other frameworks can use the loader too: here plain NumPy learns sigma_8 from universes.

    python examples/numpy_sigma8.py

Makes small synthetic universes, streams them as NumPy arrays (no torch is imported), and fits a
line through the logarithm of the counts' variance, which grows with sigma_8. JAX takes the same
arrays: ``jax.device_put(x)``.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

import hyperslab as hs
from hyperslab.synth import Universes, produce


def features(cubes):
    """The log-variance of the counts in blocks of 4^3 cells, at each redshift."""
    num, channels, *extents = cubes.shape
    blocks = cubes.reshape(num, channels, *[n for e in extents for n in (e // 4, 4)])
    return np.log(blocks.mean((3, 5, 7), dtype=np.float64).var((2, 3, 4)))


def collect(loader):
    """Features and sigma_8 of all samples, in the order in which they come."""
    rows = [(features(x), y[:, 1].copy()) for x, y in loader.numpy()]
    x, y = (np.concatenate(column) for column in zip(*rows, strict=True))
    return np.column_stack([x, np.ones(len(x))]), y


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--count", type=int, default=48)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        produce(Universes(size=args.size, count=args.count), Path(folder))
        data = hs.open(f"{folder}/*.h5", preset="cosmoflow").split(train=0.75, test=0.25)
        with hs.Loader(data["train"], batch_size=4) as train, hs.Loader(data["test"]) as test:
            x, y = collect(train)
            weights, *_ = np.linalg.lstsq(x, y, rcond=None)
            x, y = collect(test)
    correlation = np.corrcoef(x @ weights, y)[0, 1]
    print(f"sigma_8 of {len(y)} unseen universes: correlation {correlation:.2f}")
    print(f"torch was {'' if 'torch' in sys.modules else 'not '}imported")


if __name__ == "__main__":
    main()
