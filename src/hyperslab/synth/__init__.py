"""Universes, collisions and weather that no one measured: data to learn from, made from physics."""

from hyperslab.synth.climate import Climate as Climate
from hyperslab.synth.cosmo import Universes as Universes
from hyperslab.synth.hep import Collisions as Collisions
from hyperslab.synth.production import (
    Production as Production,
    Recipe as Recipe,
    produce as produce,
)
