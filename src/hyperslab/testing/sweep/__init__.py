"""Every torch operator on Slabs: right, or refused.

``sweep`` tries the operators of PyTorch's test database, and all other functions that take tensors,
on two ranks of this machine: each result must be that of one process, or ``UnsupportedOp``. As a
command it also tries rules of your own:

    python -m hyperslab.testing.sweep --import my_rules histc

It needs what PyTorch's own tests need: ``pip install hyperslab[test]``.
"""

from hyperslab.testing.sweep.findings import (
    Findings as Findings,
    Trial as Trial,
    rendered as rendered,
)
from hyperslab.testing.sweep.sweep import Effort as Effort, sweep as sweep
