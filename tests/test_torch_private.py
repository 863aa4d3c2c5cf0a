"""Each private name and each patch of torch is needed still. A test that fails says what may go."""

import subprocess
import sys
import weakref

import pytest
import torch
import torch.utils
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import hyperslab as hs
from hyperslab import torch_private
from hyperslab.testing import on_ranks, seeded

PUBLIC_NAMES = {
    torch.utils: "pytree",
    torch.autograd: "FakeTensorMode FunctionalTensor current_pass will_execute",
    torch.autograd.graph: "current_pass current_graph_task_id will_execute will_execute_node "
    "saved_tensors_hooks_active get_saved_tensors_hooks",
    torch.autograd.forward_ad: "current_level is_active",
    torch.compiler: "nonstrict_trace skip_code override_function",
    torch.func: "current_transform is_active interpreter_stack",
    torch.nn.modules.module: "has_any_global_hook",
    torch.nn.utils.parametrize: "is_cached cache_enabled",
    torch.overrides: "num_modes torch_function_stack pop_mode push_mode",
    torch.nn.Module: "call_impl register_call",
    torch: "foreach_mul foreach_copy_ foreach_div_ is_any_autocast_enabled FakeTensorMode",
    torch.UntypedStorage: "use_count num_owners",
    torch.distributed: "symmetric_memory",
    torch.cuda: "end_allocate_to_pool release_pool",
}


@pytest.mark.parametrize(
    ("space", "name"),
    [(space, name) for space, names in PUBLIC_NAMES.items() for name in names.split()],
)
def test_torch_has_no_public_name_yet(space, name):
    assert not hasattr(space, name), f"{space.__name__}.{name} may replace what torch_private uses"


@pytest.mark.slow
def test_torch_is_as_it_was_until_a_mesh_is_made():
    code = """
import sys, torch
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.nn.modules import module
def look():
    return (
        Function.apply.__func__, torch.as_tensor, torch.jit.isinstance,
        torch.nn.functional.handle_torch_function, torch.nn.Conv2d._compiled_call_impl,
        torch.rand_like, torch.dropout, torch.Tensor.normal_,
        len(module._global_buffer_registration_hooks), "einops" in sys.modules,
    )
before = look()
import hyperslab, hyperslab.nn, hyperslab.store
assert look() == before
hyperslab.init(device="cpu")
assert all(old != new for old, new in zip(before[:9], look()[:9]))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class Doubled(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Tripled(Doubled):
    """Has a rule in one test; processes of ranks are used again."""


def plain(function):
    original = torch_private.unpatched(function)
    assert original != function
    return original


@on_ranks(2)
def test_without_its_patch_a_function_would_lose_gradients():
    x = hs.shard(seeded(2, 3, 6, 5).requires_grad_(), hs.init(height=2, device="cpu"))
    lost = plain(Doubled.apply)(x)
    assert not lost.requires_grad
    with pytest.raises(hs.UnsupportedOp, match="Doubled"):
        Doubled.apply(x)


@on_ranks(2)
def test_without_its_patch_a_slab_could_not_be_given_to_as_tensor():
    x = hs.shard(seeded(2, 3, 6, 5), hs.init(height=2, device="cpu"))
    with pytest.raises(hs.UnsupportedOp, match=r"torch\.tensor"):
        plain(torch.as_tensor)(x)
    assert torch.as_tensor(x) is x


@on_ranks(2)
def test_without_its_patch_a_branch_for_tensors_would_not_be_taken():
    x = hs.shard(seeded(2, 3, 6, 5), hs.init(height=2, device="cpu"))
    assert not plain(torch.jit.isinstance)(x, torch.Tensor)
    assert torch.jit.isinstance(x, torch.Tensor)


@on_ranks(2)
def test_a_rule_holds_whether_it_is_registered_before_a_mesh_is_made_or_after():
    early = torch_private.unpatched(Tripled.apply)  # as a program gets it that made no mesh yet

    @hs.register(early)
    def doubled(x):
        return x.with_local(Tripled.apply(x.local))

    x = hs.shard(seeded(2, 3, 6, 5), hs.init(height=2, device="cpu"))
    assert hs.gather(Tripled.apply(x)).equal(2 * hs.gather(x))
    assert torch_private.unpatched(Tripled.apply) == early


def test_without_its_patch_no_mode_would_see_a_function_or_what_a_checkpoint_computes_again():
    hs.shard(torch.ones(1), hs.init(device="cpu"))  # loads and makes what patches are for
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, requires_grad=True)
    with Mode():
        plain(Doubled.apply)(x)
        assert not any(getattr(each, "__name__", "") == "apply" for each in seen)
        seen.clear()
        out = checkpoint(torch.sin, x, use_reentrant=False)
    seen.clear()
    out.sum().backward()
    assert torch.sin not in seen


@on_ranks(2)
def test_without_its_patch_a_plain_tensor_would_draw_torchs_numbers_within_a_module():
    class Net(torch.nn.Module):
        def forward(self, x):
            return torch.rand_like(x), plain(torch.rand_like)(x)

    net = hs.parallelize(Net(), hs.init(depth=2, device="cpu"))
    torch.manual_seed(0)
    due = torch.rand(5)
    torch.manual_seed(0)
    torch.randint(1 << 32, (4,))
    later = torch.rand(5)
    torch.manual_seed(0)
    ours, torchs = net(torch.ones(5))
    assert torch.equal(torchs, later)
    assert not torch.equal(ours, due)


def test_torch_does_not_swap_tensors_that_are_held_weakly():
    a, b = torch.ones(2), torch.zeros(3)
    held = weakref.ref(a)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(a, b)
    torch_private.swap_contents(a, b)
    assert held() is a
    assert (a.tolist(), b.tolist()) == ([0, 0, 0], [1, 1])


def test_fake_tensors_say_that_they_lie_at_0_unless_told_not_to():
    with torch_private.FakeTensorMode() as mode:
        assert mode._allow_unsafe_data_ptr_access
    with torch_private.fake_tensor_mode(), pytest.raises(RuntimeError, match="data pointer"):
        torch.empty(2).data_ptr()


class Calls(TorchFunctionMode):
    """Counts functions."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_without_its_patch_a_layer_would_ask_a_mode_for_each_of_its_functions():
    with Calls() as mode:
        torch.nn.BatchNorm2d(2)._call_impl(torch.ones(2, 2, 3, 3))
    assert mode.count > 1


class Half(torch.nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) / 2


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_patched_layers_are_scripted_and_traced_and_seen_by_other_modes():
    hs.shard(torch.ones(1), hs.init(device="cpu"))
    layers = torch.nn.Conv2d(3, 3, 1), torch.nn.BatchNorm2d(3), torch.nn.ReLU()
    net, x = torch.nn.Sequential(*layers, torch.nn.Dropout()).eval(), seeded(2, 3, 4, 5).float()
    due = net(x)
    assert torch.equal(torch.jit.script(net)(x), due)
    assert torch.equal(torch.jit.trace(net, x)(x), due)
    assert torch.equal(torch.fx.symbolic_trace(net)(x), due)
    with Calls() as mode:
        assert torch.equal(net(x), due)
    assert mode.count > 1
    assert torch.equal(Half(3).eval()(x), torch.nn.BatchNorm2d(3).eval()(x) / 2)


@on_ranks(2)
def test_without_its_patch_item_would_give_a_part_of_a_sum():
    mesh = hs.init(channel=2, device="cpu")
    handlers = DTensor._op_dispatcher._custom_op_handlers
    item = torch.ops.aten._local_scalar_dense.default
    layer = hs.parallelize(torch.nn.Linear(4, 4), mesh)
    layer.load_state_dict({"weight": torch.ones(4, 4), "bias": torch.ones(4)})
    assert layer.weight.sum().item() == 16
    patch = handlers.pop(item)
    assert layer.weight.sum().item() == 8
    handlers[item] = patch
