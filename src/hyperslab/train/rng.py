"""Where the random number generators stand.

``parallelize`` gives all ranks the random state of rank 0, and from then on they draw alike: masks
of dropout must not depend on the rank, and ranks compare what they drew. So the state of rank 0 is
that of all, and a run that was saved on one mesh goes on with it on any other. Code that draws on
some ranks only is brought back into step by a restart.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The state of torch's generators (CPU, and the current GPU's if in use), NumPy's, Python's."""
    kind, words, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 - of users' code
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": (kind, np.asarray(words).tolist(), *rest),
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Goes on where ``random_state`` was called; a GPU that was not in use then is left alone."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    random.setstate(state["python"])
