"""Small files of every kind that presets learn from."""

import pytest

from hyperslab.synth import Climate, Collisions, Images, Meshes, Universes, Volumes, produce

RECIPES = {
    "cosmo": Universes(size=16, count=8),
    "hep": Collisions(shape=(32, 32), count=8, per_file=4),
    "climate": Climate(shape=(32, 48), count=8),
    "mesh-1k": Meshes(size=64, block=32, count=8),
    "mesh-2k": Meshes(size=128, block=64, count=8),
    "volumes": Volumes(shape=(16, 16, 16), count=8),
    "images": Images(shape=(64, 64), count=8, per_file=8),
}


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Patterns of 8 samples each, by kind."""
    folder = tmp_path_factory.mktemp("samples")
    for kind, recipe in RECIPES.items():
        produce(recipe, folder / kind)
    return {kind: str(folder / kind / "*.h5") for kind in RECIPES}
