"""Nested state, such as a ``state_dict``, taken apart into tensors and plain JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyperslab.errors import ConfigError, FormatError

Tree = Any
"""What JSON knows, and a dict with one of these keys for what it does not know."""

TENSOR, TUPLE, ITEMS = "$tensor", "$tuple", "$items"
_MARKS = {TENSOR, TUPLE, ITEMS}


def take_apart(state: Any, path: str, tensors: dict[str, Tensor]) -> Tree:
    """``state`` as JSON, in which a dict stands for each tensor; these are put into ``tensors``.

    Floats, tuples and keys that are no text come back from ``put_together`` as they were. What
    neither JSON nor a tensor can hold is an error: nothing is pickled.

    >>> take_apart({"lr": 0.1, "betas": (0.9, 0.99)}, "adam", {})
    {'lr': 0.1, 'betas': {'$tuple': [0.9, 0.99]}}
    """
    if isinstance(state, Tensor):
        return _leaf(state, path, tensors)
    if state is None or isinstance(state, bool | int | float | str):
        return state
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, Mapping):
        parts = [(k, take_apart(v, f"{path}/{k}", tensors)) for k, v in state.items()]
        if all(isinstance(key, str) for key in state) and not _MARKS & state.keys():
            return dict(parts)
        return {ITEMS: [[take_apart(k, path, tensors), v] for k, v in parts]}
    if isinstance(state, list | tuple):
        entries = [take_apart(each, f"{path}/{i}", tensors) for i, each in enumerate(state)]
        return entries if isinstance(state, list) else {TUPLE: entries}
    raise ConfigError(
        f"{path} cannot be saved: it is a {type(state).__name__}, and checkpoints hold tensors, "
        "numbers, texts, None, and lists, tuples and dicts of them"
    )


def put_together(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:
    """The state that ``take_apart`` made ``tree`` of, with the given ``tensors``."""
    if isinstance(tree, list):
        return [put_together(each, tensors) for each in tree]
    if not isinstance(tree, dict):
        return tree
    if TENSOR in tree:
        return tensors[tree[TENSOR]]
    if TUPLE in tree:
        return tuple(put_together(each, tensors) for each in tree[TUPLE])
    if ITEMS in tree:
        return {
            put_together(key, tensors): put_together(each, tensors) for key, each in tree[ITEMS]
        }
    return {key: put_together(each, tensors) for key, each in tree.items()}


def leaves(tree: Tree) -> Iterator[dict[str, Any]]:
    """The dicts in ``tree`` that stand for tensors."""
    if isinstance(tree, dict) and TENSOR in tree:
        yield tree
    elif isinstance(tree, dict | list):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(each)


def shape_of(leaf: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(leaf["shape"])


def dtype_of(leaf: Mapping[str, Any]) -> torch.dtype:
    dtype = vars(torch).get(leaf["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"{leaf[TENSOR]} has the dtype {leaf['dtype']!r}, which torch lacks")
    return dtype


def _leaf(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> Tree:
    while path in tensors:  # a name with a slash in it can look like two names
        path += "'"
    tensors[path] = tensor
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {TENSOR: path, "shape": list(tensor.shape), "dtype": dtype}
