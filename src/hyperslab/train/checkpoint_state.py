"""The state that checkpoints hold: of modules, optimizers, values and random generators."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hyperslab.errors import ConfigError, FormatError

# Nested state, such as a ``state_dict``, taken apart into tensors and plain JSON

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


# The parts of a run: modules, optimizers, values

Parts = Mapping[str, Any]
"""By name: modules, optimizers, other things with a ``state_dict``, and plain values."""


def state_of(part: Any, parts: Parts) -> Any:
    """The state of one of ``parts``; the weights of an optimizer go by their names in the modules.

    Names, unlike torch's numbers, tell which is which after the order of weights has changed.
    """
    if isinstance(part, Optimizer):
        return _named(part, parts)
    return part.state_dict() if hasattr(part, "state_dict") else part


def load_state(part: Any, state: Any, parts: Parts) -> None:
    """Gives ``part`` the ``state`` that ``state_of`` took of it."""
    if isinstance(part, Optimizer):
        _load_named(part, state, parts)
    else:
        part.load_state_dict(state)


def destinations(part: Any, tree: Tree, parts: Parts) -> dict[str, Tensor]:
    """Tensors to read those of ``tree`` into: a module's own, and new ones for all else."""
    if isinstance(part, nn.Module):
        own = part.state_dict()
        _check_fit(own, tree)
        inner = dict(_tensor_items(tree))
        extra = empties([each for key, each in tree.items() if key not in inner])
        return extra | {leaf[TENSOR]: own[key].detach() for key, leaf in inner.items()}
    if not isinstance(part, Optimizer):
        return empties(tree)
    _check_groups(part, tree, parts)
    weights = _weights(part, parts)
    found = empties({**tree, "state": {}})
    for name, entry in tree["state"].items():
        for leaf in leaves(entry):
            found[leaf[TENSOR]] = _like(weights.get(name), leaf)
    return found


def empties(tree: Tree) -> dict[str, Tensor]:
    """Plain tensors for those of ``tree``."""
    return {
        leaf[TENSOR]: torch.empty(shape_of(leaf), dtype=dtype_of(leaf)) for leaf in leaves(tree)
    }


# Modules


def _check_fit(own: Mapping[str, Any], tree: Tree) -> None:
    saved = dict(_tensor_items(tree))
    mine = {key: each for key, each in own.items() if isinstance(each, Tensor)}
    for key in [*mine, *saved]:
        there = _shown(shape_of(saved[key]), dtype_of(saved[key])) if key in saved else "missing"
        here = _shown(tuple(mine[key].shape), mine[key].dtype) if key in mine else "missing"
        if there != here:
            raise ConfigError(
                f"{key} is {there} in the checkpoint and {here} in the model: give the model the "
                "options and the precision that it was trained with, or train in another folder"
            )


def _tensor_items(tree: Tree) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((k, each) for k, each in tree.items() if isinstance(each, dict) and TENSOR in each)


def _shown(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{'x'.join(map(str, shape)) or 'a number'} {str(dtype).removeprefix('torch.')}"


# Optimizers


def _named(optimizer: Optimizer, parts: Parts) -> dict[str, Any]:
    """The optimizer's ``state_dict``, with names of weights in place of their numbers."""
    state, names = optimizer.state_dict(), [*_weights(optimizer, parts)]
    return {
        **state,
        "class": type(optimizer).__name__,
        "state": {_renamed(key, names): each for key, each in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def _load_named(optimizer: Optimizer, state: dict[str, Any], parts: Parts) -> None:
    weights = _weights(optimizer, parts)
    numbers = {name: number for number, name in enumerate(weights)}
    groups = [
        {**group, "params": [numbers[name] for name in group["params"]]}
        for group in state["param_groups"]
    ]
    numbered = {numbers.get(key, key): each for key, each in state["state"].items()}
    rest = {key: each for key, each in state.items() if key != "class"}
    optimizer.load_state_dict({**rest, "state": numbered, "param_groups": groups})
    for name, weight in weights.items():
        _undo_casts(optimizer.state.get(weight, {}), state["state"].get(name, {}))


def _undo_casts(state: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Puts back what ``load_state_dict`` cast to the dtype of its weight."""
    for key, value in saved.items():
        cast = state.get(key)
        if isinstance(value, Tensor) and isinstance(cast, Tensor) and cast.dtype != value.dtype:
            state[key] = value.to(cast.device)


def _weights(optimizer: Optimizer, parts: Parts) -> dict[str, Tensor]:
    """The weights that the optimizer changes, in the order of torch's numbers, by name."""
    names = {
        id(weight): name if part_name == "model" else f"{part_name}/{name}"
        for part_name, part in parts.items()
        if isinstance(part, nn.Module)
        for name, weight in part.named_parameters()
    }
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return {names.get(id(weight), f"weight {i}"): weight for i, weight in enumerate(weights)}


def _renamed(key: Any, names: list[str]) -> Any:
    return names[key] if isinstance(key, int) and key < len(names) else key


def _check_groups(optimizer: Optimizer, tree: Tree, parts: Parts) -> None:
    kind, was = type(optimizer).__name__, tree["class"]
    if kind != was:
        raise ConfigError(
            f"the checkpoint holds the state of {was}, and the optimizer is {kind}: go on with "
            f"{was}, or begin with the exported weights (model.weights) in another folder"
        )
    saved = [group["params"] for group in tree["param_groups"]]
    mine = [group["params"] for group in _named(optimizer, parts)["param_groups"]]
    if mine != saved:
        shown = [" + ".join(str(len(group)) for group in groups) for groups in (saved, mine)]
        raise ConfigError(
            f"the optimizer of the checkpoint has {shown[0]} weights in its groups, this one has "
            f"{shown[1]}, or the same in another order: make it as it was made"
        )


def _like(weight: Tensor | None, leaf: dict[str, Any]) -> Tensor:
    """A tensor for the state of ``weight``, spread over the ranks like it if of the same shape."""
    shape, dtype = shape_of(leaf), dtype_of(leaf)
    if isinstance(weight, DTensor) and tuple(weight.shape) == shape:
        return torch.zeros_like(weight, dtype=dtype, requires_grad=False)
    device = "cpu" if weight is None or not shape else weight.device
    return torch.empty(shape, dtype=dtype, device=device)


# Where the random number generators stand
#
# ``parallelize`` gives all ranks the random state of rank 0, and from then on they draw alike:
# masks of dropout must not depend on the rank, and ranks compare what they drew. So the state of
# rank 0 is that of all, and a run that was saved on one mesh goes on with it on any other. Code
# that draws on some ranks only is brought back into step by a restart.


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
