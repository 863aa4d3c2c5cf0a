"""Tests on several ranks: real processes, one machine, tenths of a second.

``Team`` needs no pytest; ``on_ranks`` makes a pytest test out of a body that every rank runs.
"""

from hyperslab.testing.compare import (
    assert_same_as_serial as assert_same_as_serial,
    averaged as averaged,
    seeded as seeded,
)
from hyperslab.testing.failure import RankError as RankError
from hyperslab.testing.on_ranks import on_ranks as on_ranks
from hyperslab.testing.team import Team as Team
