"""How a trainer shows its model to others, and takes theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hyperslab.comm.mesh import Mesh
from hyperslab.comm.side_channel import SideChannel
from hyperslab.train.checkpoint_state import (
    TENSOR,
    Parts,
    Tree,
    destinations,
    empties,
    leaves,
    load_state,
    put_together,
    random_state,
    state_of,
    take_apart,
)
from hyperslab.train.tournament.mailbox import Mailbox
from hyperslab.train.tournament.offer import Offer
from hyperslab.train.tournament.others import Others

VALUES = "values"
"""The part beside model and optimizer: hyperparameters, steps, random generators."""


class Exchange:
    """The memory through which models go: laid out here, taken from others, kept for later.

    It is the same from match to match. All methods are collective over the trainer's ranks.
    """

    def __init__(
        self, mesh: Mesh, channel: SideChannel, others: Others, carry: Sequence[str]
    ) -> None:
        self._others, self._carry = others, carry
        self._mailbox = Mailbox(mesh, channel, others.timeout)
        self._inbox: tuple[object, dict[str, Tensor]] = (None, {})
        self._kept: dict[str, Tensor] = {}
        """The model that this trainer came to a match with."""

    def lay_out(
        self,
        number: int,
        parts: Parts,
        values: Mapping[str, Any],
        readers: set[int],
        score: float | None = None,
    ) -> Offer:
        """Shows this trainer's model, and what goes with it, to the others."""
        random = {"random": random_state()} if "rng" in self._carry else {}
        shown = {"model": parts["model"], VALUES: {**values, **random}}
        if "optimizer" in self._carry:
            shown["optimizer"] = parts["optimizer"]
        tensors: dict[str, Tensor] = {}
        trees = {
            name: take_apart(state_of(part, parts), name, tensors) for name, part in shown.items()
        }
        offer = self._mailbox.offer(number, tensors, ("model", "optimizer"))
        self._others.readers = readers
        note = {"number": number, "score": score, "trees": trees, "offer": offer}
        self._others.post("offer", note)  # who reads waits until all is there
        self._mailbox.fill(number, tensors)
        return offer

    def can_read(self, theirs: Offer) -> bool:
        """Whether another trainer's offer is read in memory, without its help."""
        return self._mailbox.can_read(theirs)

    def read(
        self, number: int, other: int, mine: Offer, theirs: Offer, inbox: Mapping[str, Tensor]
    ) -> None:
        """Fills ``inbox`` with what ``other`` has laid out."""
        if self._mailbox.can_read(theirs):
            self._mailbox.read(theirs, inbox)
            return
        first, second = sorted((self._others.trainer, other))
        name = f"match {number} of {first} and {second}"
        self._mailbox.swap(name, mine, theirs, inbox, first=self._others.trainer == first)

    def room(self, trees: Mapping[str, Tree], parts: Parts) -> dict[str, Tensor]:
        """Tensors for what another trainer lays out, cut like those here, kept for later."""
        key = [(leaf[TENSOR], leaf["shape"], leaf["dtype"]) for leaf in leaves(dict(trees))]
        if self._inbox[0] != key:
            inbox: dict[str, Tensor] = {}
            for name, tree in trees.items():
                if name == VALUES:
                    inbox |= empties(tree)
                    continue
                found = destinations(parts[name], tree, parts)
                inbox |= {each: torch.empty_like(tensor) for each, tensor in found.items()}
            self._inbox = key, inbox
        return self._inbox[1]

    def keep(self, parts: Parts) -> Tree:
        """Copies this trainer's model, for ``put_back``, which is given what this returns."""
        tensors: dict[str, Tensor] = {}
        tree = take_apart(state_of(parts["model"], parts), "model", tensors)
        like = [(name, x.shape, x.dtype, x.device) for name, x in self._kept.items()]
        if like != [(name, x.shape, x.dtype, x.device) for name, x in tensors.items()]:
            self._kept = {name: torch.empty_like(x.detach()) for name, x in tensors.items()}
        with torch.no_grad():
            for name, kept in self._kept.items():
                kept.copy_(tensors[name])
        return tree

    def put_back(self, parts: Parts, tree: Tree) -> None:
        """Goes on with the model that was there when ``keep`` gave ``tree``."""
        load_state(parts["model"], put_together(tree, self._kept), parts)

    def close(self) -> None:
        self._mailbox.close()
