"""Universes, collisions and weather that no one measured: data to learn from, made from physics."""
