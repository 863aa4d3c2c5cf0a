"""Tensors in what a module returns: found, and replaced, in the same order."""

from collections import OrderedDict
from dataclasses import InitVar, dataclass, field

import pytest
import torch

import hyperslab as hs
from hyperslab.nn.outputs import map_tensors, tensors_of
from hyperslab.testing.strategies import Place


@dataclass
class Computed:
    """With a field that it computes, between others, and one that is no field."""

    first: torch.Tensor
    sum: torch.Tensor = field(init=False)
    last: object = None
    factor: InitVar[int] = 10
    unset: torch.Tensor = field(init=False)

    def __post_init__(self, factor):
        self.sum = self.first * factor


@dataclass(frozen=True)
class Frozen:
    pair: tuple[torch.Tensor, torch.Tensor]
    name: str


@dataclass(frozen=True, slots=True)
class Slotted:
    value: torch.Tensor


def outputs():
    one, two, three = (torch.tensor(float(n)) for n in (1, 2, 3))
    return [
        Computed(one, last=[two, Frozen((three, one), "x")]),
        OrderedDict(b=Slotted(two), a=(three, None)),
    ]


def test_tensors_are_replaced_in_the_order_in_which_they_are_found():
    values = iter(range(100, 200))
    out = outputs()
    found = map_tensors(lambda _: torch.tensor(next(values)), out)
    assert [x.item() for x in tensors_of(found)] == list(range(100, 107))
    assert [x.item() for x in tensors_of(out)] == [1, 10, 2, 3, 1, 2, 3]  # which stay


def test_records_keep_their_classes_and_computed_fields_are_not_computed_again():
    computed, rest = map_tensors(lambda x: x + 1, outputs())
    assert (computed.first, computed.sum) == (2, 11)
    frozen = computed.last[1]
    assert type(frozen) is Frozen
    assert (frozen.pair, frozen.name) == ((4, 2), "x")
    assert rest["b"] == Slotted(torch.tensor(3.0))
    with pytest.raises(AttributeError):
        _ = computed.unset


LAZY = {
    "generator": lambda x: (x * k for k in range(3)),
    "map": lambda x: (x, map(torch.sin, [x])),
    "zip": lambda x: {"pairs": zip([x], [x], strict=True)},
}


class Lazy(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        return LAZY[self.name](x)


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("axes", [{}, {"height": 2}], ids=str)
def test_outputs_that_are_yet_to_be_computed_are_refused(run, axes, name):
    run(Place(axes), check_lazy, name)


def check_lazy(place, name):
    mesh = place.mesh()
    net = hs.parallelize(Lazy(name), mesh)
    with pytest.raises(hs.UnsupportedOp, match=f"returns a {name}, whose code would run after"):
        net(hs.shard(torch.ones(1, 1, 4, 4), mesh))
