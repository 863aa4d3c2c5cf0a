"""Activation and pool in one kernel, against torch's two, and with other blocks."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product

import torch.nn.functional as F
from gpu.rows import Bench, Row, backward_of, errors_of
from torch import Tensor

from hyperslab.kernels import act_pool_plan
from hyperslab.kernels.act_pool import activate_and_pool
from hyperslab.kernels.act_pool_plan import Pool, Tuning

AVERAGE = Pool("avg", (3, 3, 3), (2, 2, 2), (1, 1, 1))
MAXIMUM = Pool("max", (2, 2, 2), (2, 2, 2), (0, 0, 0))


def pools_rows(bench: Bench) -> Iterator[Row]:
    shapes = [(1, 16, 128, 512, 512), (1, 16, 512, 512, 512), (1, 32, 256, 256, 256)]
    for shape in [(1, 4, 6, 8, 8)] if bench.small else shapes:
        for last in (True, False):
            y = bench.randn(shape, last=last)
            for pool in (AVERAGE, MAXIMUM):
                note = ""
                if y.numel() < 2**31:  # beyond, torch's pools write where they must not
                    yield from _pool_rows(bench, y, pool, "torch", _torch_pool)
                    note = _errors(y, pool)
                yield from _pool_rows(bench, y, pool, "one kernel", activate_and_pool, note)
            del y


def _errors(y: Tensor, pool: Pool) -> str:
    return errors_of(
        lambda x: activate_and_pool(x, 0.01, pool), lambda x: _torch_pool(x, 0.01, pool), y
    )


def _torch_pool(y: Tensor, slope: float, pool: Pool) -> Tensor:
    function = F.avg_pool3d if pool.mode == "avg" else F.max_pool3d
    return function(F.leaky_relu(y, slope), pool.kernel, pool.stride, pool.padding)


def _pool_rows(
    bench: Bench,
    y: Tensor,
    pool: Pool,
    name: str,
    run: Callable[[Tensor, float, Pool], Tensor],
    note: str = "",
) -> Iterator[Row]:
    last = "contiguous" if y.is_contiguous() else "channels_last"
    what = f"leaky + {pool.mode} pool, {'x'.join(map(str, y.shape[1:]))} {last}, {name}"
    pooled = math.prod(pool.output_shape(y.shape)) * y.itemsize

    def forward() -> object:
        return run(y, 0.01, pool)

    moved = y.nbytes + pooled
    yield bench.timer.row(f"{what}, forward", forward, nbytes=moved, dtype=y.dtype, note=note)
    source = y.detach().requires_grad_()
    backward = backward_of(lambda: run(source, 0.01, pool), source)
    yield bench.timer.row(f"{what}, backward", backward, nbytes=moved, dtype=y.dtype)


def tuning_rows(bench: Bench) -> Iterator[Row]:
    """One number at a time is another than in the tuning that is used."""
    y = bench.randn((1, 4, 6, 8, 8) if bench.small else (1, 16, 256, 512, 512), last=True)
    for pool in (AVERAGE, MAXIMUM):
        yield from _pool_rows(bench, y, pool, "as it is", activate_and_pool)
        for name, factor in product(Tuning._fields[: 1 if bench.small else None], (0.5, 2)):
            with _tuned(pool.mode, name, factor):
                yield from _pool_rows(bench, y, pool, f"{factor:g} x {name}", activate_and_pool)


@contextmanager
def _tuned(kind: str, name: str, factor: float) -> Iterator[None]:
    before = dict(act_pool_plan.TUNING)
    for key, tuning in before.items():
        if key[0] == kind:
            value = max(1, int(getattr(tuning, name) * factor))
            act_pool_plan.TUNING[key] = tuning._replace(**{name: value})
    try:
        yield
    finally:
        act_pool_plan.TUNING.update(before)
