"""What layers that are computed twice must find the same the second time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from hyperslab.nn.survey import Weights, traits


@dataclass(frozen=True)
class Seen:
    """What layers depend on besides their inputs and the weights that autograd watches."""

    modules: Sequence[nn.Module]
    wants: Sequence[bool]
    attributes: object
    tensors: Sequence[tuple[Tensor, int]]
    """Buffers and frozen weights, and how often they had been written into."""

    @classmethod
    def now(cls, modules: Sequence[nn.Module], wants: Sequence[bool]) -> Seen:
        parameters = zip(Weights(modules).parameters, wants, strict=True)
        frozen = [p for p, is_wanted in parameters if not is_wanted]
        buffers = [b for m in modules for b in m.buffers(recurse=False)]
        found = [(t, t._version) for t in (*frozen, *buffers)]
        return cls(modules, wants, traits(modules, (), modes=False), found)

    def is_still_so(self) -> bool:
        new = Seen.now(self.modules, self.wants)
        pairs = [*zip(new.tensors, self.tensors, strict=False)]
        return (
            new.attributes == self.attributes
            and len(new.tensors) == len(self.tensors)
            and all(a is b and m == n for (a, m), (b, n) in pairs)
        )
