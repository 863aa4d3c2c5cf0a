"""What is noticed of a module that changes."""

import gc
import weakref
from collections import deque

import pytest
import torch
from torch import nn

from hyperslab.nn.module_snapshot import ModuleSnapshot, TensorVersions, TrainedWeights

CPU = torch.device("cpu")


class Holder(nn.Module):
    scale = 1.0
    table = {"a": 1}  # noqa: RUF012 - as users may

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3, bias=False)
        self.count, self.words = 1000, ["a", "b"]
        self.masks = [torch.ones(3)]
        self.deep = {"x": [{"y": (torch.ones(2),)}], "parts": [nn.Linear(2, 2)]}
        self.queue, self.names = deque([1, 2]), {"n"}


def transpose(m):
    m.linear.weight.data = m.linear.weight.data.t()


def cut(m):
    m.linear.weight.data = m.linear.weight.data[:2]


def view(m):
    m.masks[0].data = m.masks[0].data.view(torch.int32)


def move(m):
    m.deep["x"][0]["y"][0].data = torch.ones(2)


CHANGES = {
    "transposed weight": transpose,
    "cut weight": cut,
    "values of another type": view,
    "moved tensor, deep inside": move,
    "tensor in a list": lambda m: m.masks.__setitem__(0, torch.ones(3)),
    "entry of a list": lambda m: m.words.__setitem__(1, "c"),
    "longer list": lambda m: m.words.append("c"),
    "entry of a dict, deep inside": lambda m: m.deep["x"][0].update(y=2),
    "key of a dict": lambda m: m.deep.update(z=m.deep.pop("parts")),
    "queue": lambda m: m.queue.rotate(),
    "set": lambda m: m.names.add("k"),
    "module in a list": lambda m: setattr(m.deep["parts"][0], "weight", None),
    "weight that wants no gradient": lambda m: m.deep["parts"][0].requires_grad_(False),
    "number": lambda m: setattr(m, "count", 1001),
    "hook": lambda m: m.linear.register_forward_hook(print),
    "attribute of the class": lambda m: setattr(type(m), "scale", 2.0),
    "dict of the class": lambda m: m.table.update(a=2),
}


@pytest.mark.parametrize("what", CHANGES)
def test_changes_are_noticed(what):
    cls = type("Holder", (Holder,), {"scale": 1.0, "table": {"a": 1}, "__module__": "mine"})
    module = cls()
    snapshot = ModuleSnapshot(module, CPU)
    assert not snapshot.change()
    CHANGES[what](module)
    assert snapshot.change()


def test_what_is_equal_has_not_changed():
    module = Holder()
    snapshot = ModuleSnapshot(module, CPU)
    module.count = int("1000")
    module.words[0] = "".join(["a", ""])
    with torch.no_grad():
        module.linear.weight += 1
        module.masks[0].zero_()
    assert not snapshot.change()


def test_the_memory_that_tensors_had_is_kept():
    module = Holder()
    snapshot = ModuleSnapshot(module, CPU)
    mask, storage = weakref.ref(module.masks[0]), module.linear.weight.untyped_storage()
    module.masks.clear()
    module.linear.weight.data = torch.ones(3, 3)
    address = storage.data_ptr()
    del storage
    gc.collect()
    assert mask() is not None
    assert address in [x.untyped_storage().data_ptr() for x in snapshot._memory]


def test_values_count_where_they_are_not_on_the_device():
    module = Holder()
    snapshot = ModuleSnapshot(module, torch.device("meta"))
    assert not snapshot.change()
    module.masks[0].zero_()
    assert snapshot.change()


def test_tensors_without_a_place_in_memory_are_told_apart():
    module = Holder()
    module.edges = torch.eye(3).to_sparse()
    snapshot = ModuleSnapshot(module, CPU)
    assert snapshot.untracked == [module.edges]
    assert not snapshot.change()


def test_what_was_changed_is_put_back():
    module = Holder()
    snapshot, weight = ModuleSnapshot(module, CPU), module.linear.weight
    module.count, module.other = 0, 1
    module.words.append("c")
    module.queue.rotate()
    module.names.clear()
    module.deep["x"][0].clear()
    module.deep["parts"][0].bias = None
    module.linear.weight = nn.Parameter(torch.zeros(3, 3))
    module.linear.register_forward_hook(print)
    del module.masks
    assert snapshot.change()
    snapshot.restore()
    assert not snapshot.change()
    assert module.linear.weight is weight
    assert not hasattr(module, "other")
    assert (module.count, module.words, [*module.queue]) == (1000, ["a", "b"], [1, 2])


def test_versions_tell_of_writes_and_of_other_tensors():
    x, y = torch.ones(2), torch.ones(2)
    before = TensorVersions([x])
    assert before == TensorVersions([x])
    assert before != TensorVersions([y])
    assert before != TensorVersions([x, y])
    x.add_(1)
    assert before.have_changed()
    assert before != TensorVersions([x])


def freeze(net):
    net[0].weight.requires_grad_(False)


def replace_weight(net):
    net[0].weight = nn.Parameter(torch.ones(2, 2))


def replace_table(net):
    net[0]._parameters = {"weight": nn.Parameter(torch.ones(2, 2)), "bias": None}


def add_layer(net):
    net[1].append(nn.Linear(2, 2))


def remove_layer(net):
    del net[1][0]


def tie(net):
    net[1][0].weight = net[0].weight


@pytest.mark.parametrize(
    "change", [freeze, replace_weight, replace_table, add_layer, remove_layer, tie]
)
def test_trained_weights_are_found_again_after_a_change(change):
    net = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]))
    weights = TrainedWeights(net)
    before = weights.find()
    assert weights.find() is before
    change(net)
    after = weights.find()
    assert [*map(id, after)] == [id(p) for p in net.parameters() if p.requires_grad]
    assert [*map(id, after)] != [*map(id, before)]
    assert weights.find() is after
