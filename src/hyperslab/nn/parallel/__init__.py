"""Modules that train on a mesh: ``parallelize``, and the averaging of their gradients."""
