"""Universes, collisions, weather and more that no one measured, made from physics and geometry."""

from hyperslab.synth.climate import Climate as Climate
from hyperslab.synth.cosmo import Universes as Universes
from hyperslab.synth.hep import Collisions as Collisions
from hyperslab.synth.images import Images as Images
from hyperslab.synth.mesh import Meshes as Meshes
from hyperslab.synth.production import (
    Production as Production,
    Recipe as Recipe,
    produce as produce,
)
from hyperslab.synth.volumes import Volumes as Volumes
