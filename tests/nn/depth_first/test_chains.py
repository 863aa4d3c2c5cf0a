"""Rules one after another: cuts travel with the tensor, and tensors of different cuts meet."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import places

examples = settings(max_examples=12, deadline=None)


def of_dims(name, x):
    return getattr(F, name.format(x.ndim - 2))


def meets(x, earlier, join):
    """``x`` joined to the last earlier tensor of its shape, which may be cut elsewhere."""
    same = [y for y in earlier if y.shape == x.shape]
    return join(x, same[0]) if same else x


def rearranged(x):
    """The spatial dims in another order, and with them what splits them."""
    return x.transpose(2, -1)


def beside(x, y):
    """Two tensors along the last dim, and the larger of every two columns."""
    return of_dims("max_pool{}d", x)(torch.cat([x, y], -1), (1,) * (x.ndim - 3) + (2,))


STEPS = {
    "convolve": lambda x, w, v, _: of_dims("conv{}d", x)(x, w, padding=1),
    "shrink": lambda x, w, v, _: of_dims("conv{}d", x)(x, w, stride=2, padding=1),
    "widen": lambda x, w, v, _: (
        of_dims("conv_transpose{}d", x)(x, w, stride=2, padding=1) if max(x.shape[2:]) < 9 else x
    ),
    "pool": lambda x, w, v, _: of_dims("max_pool{}d", x)(x, 3, 2, 1),
    "smooth": lambda x, w, v, _: of_dims("avg_pool{}d", x)(x, 2, 1) if min(x.shape[2:]) > 1 else x,
    "pad": lambda x, w, v, _: F.pad(x, (1, 0) * (x.ndim - 2)),
    "wrap": lambda x, w, v, _: F.pad(x, (1,) * (2 * x.ndim - 4), "circular"),
    "crop": lambda x, w, v, _: F.pad(x, (-1, 0)) if x.shape[-1] > 1 else x,
    "normalize": lambda x, w, v, _: (
        F.batch_norm(x, None, None, training=True) if x.numel() > 2 else x
    ),
    "bend": lambda x, w, v, _: F.leaky_relu(x * 1, 0.1, inplace=True),
    "gate": lambda x, w, v, _: x * torch.sigmoid(x.mean(tuple(range(2, x.ndim)), keepdim=True)),
    "scale rows": lambda x, w, v, _: x * (1 + x.sum(tuple(range(x.ndim - 1))).tanh()),
    "turn": lambda x, w, v, _: rearranged(x),
    "view": lambda x, w, v, _: x.flatten(2).view(x.shape),
    "skip": lambda x, w, v, earlier: meets(x, earlier, torch.add),
    "add in place": lambda x, w, v, earlier: meets(x * 1, earlier, lambda x, y: x.add_(y)),
    "concatenate": lambda x, w, v, earlier: meets(
        x, earlier, lambda x, y: of_dims("conv{}d", x)(torch.cat([y, x], 1), v)
    ),
    "stack up": lambda x, w, v, earlier: meets(x, earlier, beside),
}


class Chain(NamedTuple):
    shape: tuple[int, ...]
    steps: tuple[str, ...]

    def __call__(self, x, w, v):
        earlier = [x]
        for step in self.steps:
            x = STEPS[step](x, w, v, earlier)
            earlier.append(x)
        return x


@st.composite
def chains(draw):
    extents = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    steps = draw(st.lists(st.sampled_from(sorted(STEPS)), min_size=2, max_size=7))
    return Chain((draw(st.integers(1, 3)), 2, *extents), tuple(steps))


def check_chain(place, chain):
    num_dims = len(chain.shape) - 2
    w = seeded(2, 2, *[3] * num_dims, seed=1) / math.sqrt(2 * 3**num_dims)
    v = seeded(2, 4, *[1] * num_dims, seed=2)
    assert_same_as_serial(
        lambda x, w, v: chain(x, w, v) + 0 * (w.sum() + v.sum()),
        [seeded(*chain.shape)],
        [w, v],
        mesh=place.mesh(),
        cuts=place.cuts_of(len(chain.shape)),
        tolerance=1e-8,  # norms one after another amplify rounding
    )


@examples
@given(st.data(), chains())
def test_any_chain_equals_that_of_one_process(run, data, chain):
    run(data.draw(places(chain.shape)), check_chain, chain)
