"""All operators that are swept."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from hyperslab.testing.sweep.database import database, from_database, functions_of
from hyperslab.testing.sweep.further import further_operators
from hyperslab.testing.sweep.operators import Operator


@cache
def operators() -> Mapping[str, Operator]:
    """The operators of PyTorch's database, then what else takes tensors, by name."""
    listed = {each.name: each for each in map(from_database, database())}
    known = {function for info in database() for function in functions_of(info)}
    return listed | {each.name: each for each in further_operators(listed, known)}
