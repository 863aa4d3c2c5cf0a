"""Plausible mistakes in the source, and what finds out whether the tests notice them."""

from mutation import arithmetic, data, foreign, networks, programs, recorder, traces

MUTANTS = [
    *arithmetic.MUTANTS,
    *networks.MUTANTS,
    *data.MUTANTS,
    *programs.MUTANTS,
    *recorder.MUTANTS,
    *foreign.MUTANTS,
    *traces.MUTANTS,
]
