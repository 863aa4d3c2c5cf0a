"""Small files of every kind that presets learn from."""

import pytest

from hyperslab.synth import Climate, Collisions, Universes, produce

RECIPES = {
    "cosmo": Universes(size=32, count=8),
    "hep": Collisions(shape=(32, 32), count=8, per_file=4),
    "climate": Climate(shape=(64, 96), count=8),
}


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Patterns of 8 samples each, by kind."""
    folder = tmp_path_factory.mktemp("samples")
    for kind, recipe in RECIPES.items():
        produce(recipe, folder / kind)
    return {kind: str(folder / kind / "*.h5") for kind in RECIPES}
