"""Outputs and targets brought to shapes and dtypes that a loss compares element by element.

Nothing is broadcast: what does not fit is an error, the same on every rank, because shapes and the
range of labels are global.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hyperslab.comm import gather_stacked
from hyperslab.errors import ConfigError
from hyperslab.nn import Slab

Values: TypeAlias = Any
"""A Slab, or a plain tensor that is whole on every rank."""

IGNORED = -100
"""The label of cells that count neither in losses nor in scores."""


def widened(x: Values) -> Values:
    """``x`` in float32 at least."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def the_tensor(output: object) -> Values:
    """The output of a model that has to be one tensor of numbers."""
    if not isinstance(output, Slab | Tensor):
        raise ConfigError(
            f"the model gives a {type(output).__name__}, and this loss compares one tensor with "
            "the target: return one tensor, or name a function of yours in task.loss"
        )
    if not output.is_floating_point():
        raise ConfigError(f"the model gives {output.dtype}: a loss needs real numbers")
    return widened(output)


def fit_values(output: Values, target: Values) -> tuple[Values, Values]:
    """Output and target with the shape of the output; dims of extent 1 may be left out of one."""
    output = the_tensor(output)
    if target.is_complex():
        raise ConfigError(f"the target is {target.dtype}: numbers to learn must be real")
    if _without_ones(output.shape) != _without_ones(target.shape):
        raise ConfigError(
            f"the model gives {tuple(output.shape)} and the target is {tuple(target.shape)}: "
            f"{_advice(output.shape, target.shape)}, or name another array in task.target"
        )
    return output, _shaped(target, output.shape).to(output.dtype)


def _advice(output: Sequence[int], target: Sequence[int]) -> str:
    """What would make the values of a model fit: other extents, or another number of outputs."""
    ndim = max(len(output), len(target))
    one, other = (
        (*shape[:1], *(1,) * (ndim - len(shape)), *shape[1:]) for shape in (output, target)
    )
    if ndim > 2 and one[1] == other[1]:
        return (
            "their extents differ, so use a model that gives maps of that size (model.options) or "
            "data of another"
        )
    return "set the number of outputs in model.options"


def fit_labels(output: Values, target: Values, *, loss: str) -> tuple[Values, Values]:
    """Logits (N, K, ...) and labels (N, ...), or probabilities (N, K, ...) of the classes.

    One logit tells class 1 from class 0.
    """
    output = the_tensor(output)
    if output.ndim == 1:
        output = output.unsqueeze(1)
    _check_num_logits(output, loss)
    if tuple(target.shape) == tuple(output.shape) and output.shape[1] > 1:
        return output, _probabilities(target, output)
    cells = (output.shape[0], *output.shape[2:])
    if _without_ones(cells) != _without_ones(target.shape):
        raise ConfigError(
            f"the model gives {tuple(output.shape)} and the target is {tuple(target.shape)}: "
            f"labels of {cells} were expected; name another array in task.target, or another "
            "task.kind"
        )
    return output, _labels(_shaped(target, cells), num_classes(output))


def num_classes(logits: Values) -> int:
    return max(2, int(logits.shape[1]))


def fit_weight(weight: Values, num_samples: int) -> Values:
    """One weight a sample, (N,)."""
    if _without_ones(weight.shape) != _without_ones((num_samples,)):
        raise ConfigError(
            f"a batch of {num_samples} samples has weights of shape {tuple(weight.shape)}: "
            "task.weight must name an array with one number a sample"
        )
    weight = _shaped(weight, (num_samples,))
    return weight if weight.is_floating_point() else weight.float()


def beside(weight: Values, x: Values) -> Values:
    """The weights (N,) of samples with as many dims as ``x``."""
    for _ in range(x.ndim - 1):
        weight = weight.unsqueeze(-1)
    return weight


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape[:1], *(extent for extent in shape[1:] if extent != 1))


def _shaped(x: Values, shape: Sequence[int]) -> Values:
    """``x``, whose shape is ``shape`` but for dims of extent 1, with exactly that shape."""
    if tuple(x.shape) == tuple(shape):
        return x
    for dim in range(x.ndim - 1, 0, -1):
        if x.shape[dim] == 1:
            x = x.squeeze(dim)
    for dim, extent in enumerate(shape[1:], 1):
        if extent == 1:
            x = x.unsqueeze(dim)
    return x


def _check_num_logits(output: Values, loss: str) -> None:
    num = output.shape[1]
    if loss in ("bce", "dice_bce") and num != 1:
        raise ConfigError(
            f"task.loss = {loss!r} wants one logit, and the model gives {tuple(output.shape)}: "
            "give it one output, or use cross_entropy"
        )
    if loss in ("cross_entropy", "dice_cross_entropy") and num == 1:
        raise ConfigError(
            f"task.loss = {loss!r} wants a logit for each class, and the model gives "
            f"{tuple(output.shape)}: give it two outputs, or set task.loss = 'bce'"
        )


def _probabilities(target: Values, output: Values) -> Values:
    """Probabilities or one-hot labels as numbers, checked: each cell's sum is 1."""
    target = target.to(output.dtype)
    if target.numel() and float((target.sum(1) - 1).abs().amax()) > 1e-3:
        raise ConfigError(
            f"the target of shape {tuple(target.shape)} is taken for the probabilities of "
            f"{target.shape[1]} classes, but they do not sum to 1"
        )
    return target


def _labels(target: Values, num: int) -> Values:
    """Labels as int64, each below ``num`` or ``IGNORED``.

    They are looked at on every device: on a GPU a label without a class would end the process.
    """
    if not _is_whole(target):
        raise ConfigError(
            f"labels must be whole numbers, but the target, {target.dtype}, has others: name "
            "another array in task.target, or set task.kind = 'regression'"
        )
    labels = target.long()
    low, high = _range(labels)
    if low < 0 or high >= num:
        raise ConfigError(
            f"a label is {low if low < 0 else high}, and with {num} classes they go from "
            f"0 to {num - 1} ({IGNORED}: does not count): set the number of classes in "
            "model.options, or mend the labels"
        )
    return labels


def _is_whole(x: Values) -> bool:
    if x.is_floating_point():
        return not bool((x != x.round()).any())
    return not x.is_complex()


def _range(labels: Values) -> tuple[int, int]:
    """The least and the largest label that counts, over all ranks."""
    local = labels.local if isinstance(labels, Slab) else labels
    counted = local.where(local != IGNORED, 0)
    ends = torch.stack(counted.aminmax()) if local.numel() else local.new_zeros(2)
    if isinstance(labels, Slab):
        ends = gather_stacked(ends, labels.mesh, labels.layout.axes)
    ends = ends.view(-1, 2)
    return int(ends[:, 0].min()), int(ends[:, 1].max())
