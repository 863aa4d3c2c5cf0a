"""What a Slab shows of the whole tensor, and what it refuses."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._pytree import tree_map

import hyperslab as hs
from hyperslab.testing import Team, assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place

X5 = (3, 4, 11, 9, 10)
DEPTH = Place({"depth": 2}, {"depth": [0, 1, 11]})


def check_attributes(place):
    mesh = place.mesh()
    x = hs.shard(seeded(*X5).requires_grad_(), mesh, cuts=place.cuts_of(5))
    assert x.shape == torch.Size(X5) == x.size()
    assert isinstance(x.shape, torch.Size)
    assert (x.size(1), x.size(-1), x.size(dim=2), x.shape[2]) == (4, 10, 11, 11)
    assert x.ndim == x.dim() == x.ndimension() == 5
    assert x.numel() == x.nelement() == torch.numel(x) == 11880
    assert len(x) == 3
    assert (x.dtype, x.device, x.is_cuda) == (torch.float64, torch.device("cpu"), False)
    assert x.requires_grad
    assert not x.detach().requires_grad
    assert x.is_floating_point()
    assert torch.is_floating_point(x)
    assert not torch.is_complex(x)
    assert not x.is_complex()
    assert x.element_size() == 8
    assert tuple(x.local.shape) == x.box.shape == (3, 4, [1, 10][mesh.rank], 9, 10)
    assert x.is_contiguous()
    assert {x: 1}[x] == 1  # hashed by identity, as tensors are
    assert not isinstance(x, torch.Tensor)
    words = f"Slab(3x4x11x9x10, dim 2 split over depth=2; rank {mesh.rank} holds 3x4x"
    assert repr(x).startswith(words)
    assert repr(x).endswith("9x10, torch.float64, cpu)")


def test_attributes_are_those_of_the_whole_tensor(run):
    run(DEPTH, check_attributes)


def check_copies(place):
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    shallow, deep = copy.copy(x), copy.deepcopy(x)
    assert shallow.local is x.local
    assert deep.local is not x.local
    assert torch.equal(deep.local, x.local)
    assert shallow.layout == deep.layout == x.layout
    assert shallow.mesh is deep.mesh is x.mesh


def test_a_slab_can_be_copied(run):
    run(DEPTH, check_copies)


def check_pickles(place, folder):
    mesh = place.mesh()
    x = hs.shard(seeded(*X5).requires_grad_(), mesh, cuts=place.cuts_of(5))
    for slab in (x, x.detach(), x[:, :, 3:], (x > 0).transpose(1, 2)):
        again = pickle.loads(pickle.dumps(slab))
        assert type(again) is hs.Slab
        assert again.local.equal(slab.local)
        assert (again.layout, again.requires_grad) == (slab.layout, slab.requires_grad)
        assert hs.gather(again * 2).equal(hs.gather(slab) * 2)
    path = f"{folder}/{mesh.rank}.pt"
    torch.save({"x": x, "step": 3}, path)
    assert hs.gather(torch.load(path, weights_only=False)["x"]).equal(seeded(*X5))
    dist.barrier()
    with pytest.raises(hs.ConfigError, match=r"rank \d of depth=2 .*each rank load what it saved"):
        torch.load(f"{folder}/{1 - mesh.rank}.pt", weights_only=False)


def test_a_slab_is_pickled_for_the_same_rank_of_the_same_mesh(run, tmp_path):
    run(DEPTH, check_pickles, tmp_path)


REFUSED = {
    "roll across all dims": (lambda x: torch.roll(x, 1), "torch.roll"),
    "strides": (lambda x: x.stride(), "torch.Tensor.stride"),
    "sort": (lambda x: torch.sort(x, 2), "torch.sort"),
    "array": (lambda x: x.numpy(), "torch.Tensor.numpy"),
    "storage": (lambda x: x.untyped_storage(), "torch.Tensor.untyped_storage"),
    "retained gradient": (lambda x: x.retain_grad(), "torch.Tensor.retain_grad"),
    "mask": (lambda x: x[x > 0], "torch.Tensor.__getitem__"),
    "transform": (lambda x: torch.fft.fftn(x), "torch.fft.fftn"),
    "numbers": (lambda x: x.tolist(), "torch.Tensor.tolist"),
    "backward": (lambda x: x.backward(), "torch.Tensor.backward"),
    "one number": (lambda x: x.item(), "torch.Tensor.item"),
    "noise": (lambda x: x.random_(), "torch.Tensor.random_"),
    "sampling": (
        lambda x: F.grid_sample(x, torch.zeros(3, 2, 2, 2, 3)),
        "torch.nn.functional.grid_sample",
    ),
    "hook": (lambda x: x.register_hook(print), "torch.Tensor.register_hook"),
}


def check_refused(place, name):
    function, function_name = REFUSED[name]
    x = hs.shard(seeded(*X5), place.mesh(), cuts=place.cuts_of(5))
    with pytest.raises(hs.UnsupportedOp) as caught:
        function(x)
    words = str(caught.value)
    assert function_name in words
    assert "3x4x11x9x10, dim 2 split over depth=2" in words
    assert "hyperslab.gather(x)" in words
    assert f"hyperslab.register({words.split(' cannot run')[0]})" in words
    assert isinstance(caught.value, NotImplementedError)
    assert hs.gather(x).equal(seeded(*X5))  # and all ranks go on together


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_without_a_rule_says_what_to_do(run, name):
    run(DEPTH, check_refused, name)


def check_python(place):
    x = hs.shard(seeded(*X5), place.mesh())
    for convert in (bool, float, int, complex):
        with pytest.raises(TypeError, match=r"a Slab has no .*: hyperslab\.gather"):
            convert(x)
    with pytest.raises(TypeError, match="a Slab is no array"):
        np.asarray(x)
    with pytest.raises(AttributeError, match="a Slab has no attribute 'colour'"):
        _ = x.colour
    with pytest.raises(AttributeError):
        x.local = seeded(3)
    with pytest.raises(TypeError, match="unsupported format string"):
        f"{x:.3f}"
    assert f"{x}" == str(x)
    assert not torch.is_tensor(x)


def test_a_slab_of_several_elements_is_no_number(run):
    run(DEPTH, check_python)


def check_one_element(place):
    mesh = place.mesh()
    plain = torch.tensor([[2.5]], dtype=torch.float64).requires_grad_()
    x = hs.shard(plain, mesh, axes=[None, "depth"], cuts={"depth": [0, 0, 1]})
    assert x.item() == float(x) == complex(x) == 2.5
    assert (int(x), bool(x)) == (2, True)
    number = x[0, 0]
    assert (number.item(), len(x), f"{number:.3f}") == (2.5, 1, "2.500")
    assert 2.5 in x
    assert 2 not in x
    (x * 3).backward()
    assert plain.grad.tolist() == [[3.0]]
    x.backward(torch.tensor([[2.0]]))
    assert plain.grad.tolist() == [[5.0]]


def test_a_slab_of_one_element_is_a_number(run):
    run(DEPTH, check_one_element)


def check_tensor_attributes(place):
    plain = seeded(*X5).requires_grad_()
    x = hs.shard(plain, place.mesh(), cuts=place.cuts_of(5))
    assert (x.itemsize, x.nbytes, x.is_leaf) == (8, 8 * 11880, False)
    assert type(x.grad_fn) is type(x.local.grad_fn)
    assert x.grad is None
    for name in ("is_sparse", "is_quantized", "is_mps", "is_xpu", "is_meta", "is_nested"):
        assert getattr(x, name) is False
    assert x.is_cpu
    assert x.mT.shape == (3, 4, 11, 10, 9)
    assert x[0, 0, 0].T.shape == x[0, 0, 0].H.shape == (10, 9)
    assert not x.data.requires_grad
    assert x.data.local.data_ptr() == x.local.data_ptr()
    with pytest.raises(AttributeError, match="_version"):
        _ = x._version
    assert not hasattr(x, "names_of_dims")
    leaf = hs.shard(seeded(*X5), place.mesh()).requires_grad_()
    leaf.sum().backward()
    with pytest.raises(AttributeError, match=r"requires_grad_\(\) on the plain tensor"):
        _ = leaf.grad


def test_attributes_that_models_read_are_there(run):
    run(DEPTH, check_tensor_attributes)


def check_gradient_of_one_rank(place):
    x = hs.shard(seeded(2, 3).requires_grad_(), place.mesh()) * 2
    seen = []
    x.register_hook(seen.append)
    x.retain_grad()
    x.sum().backward()
    assert seen[0].equal(torch.ones(2, 3, dtype=torch.float64))
    assert hs.gather(x.grad).equal(seen[0])


def test_one_rank_sees_gradients_as_torch_does(run):
    run(Place({}), check_gradient_of_one_rank)


def check_whole(place):
    """What no axis splits runs by torch itself, whatever the function."""
    mesh = place.mesh()
    x, plain = hs.shard(seeded(3, 4), mesh), seeded(3, 4)
    for function in (
        lambda x: torch.roll(x, 1),
        lambda x: x[1:, None],
        lambda x: torch.softmax(x, 1),
        lambda x: x @ x.t(),
        lambda x: x.max(1).values,
        lambda x: torch.stack([x, x], 1),
        lambda x: x.sort(descending=True)[0],
        lambda x: torch.linalg.norm(x),
        lambda x: x.view(torch.int64),
        lambda x: F.pad(x, (1, -2)),
    ):
        out = function(x)
        torch.testing.assert_close(hs.gather(out), function(plain))
        assert isinstance(out, hs.Slab) or out.ndim == 0
    assert x.tolist() == plain.tolist()
    y = x.clone()
    y[0, 1] = 5.0
    assert y.tolist()[0][1] == 5.0
    assert y.index_fill_(0, torch.tensor([2]), 0.0) is y


@pytest.mark.parametrize("axes", [{}, {"depth": 2}, {"height": 2, "width": 2}], ids=str)
def test_a_whole_tensor_knows_every_function(run, axes):
    run(Place(axes), check_whole)


def check_whole_gradient(place):
    assert_same_as_serial(
        lambda x, w: torch.softmax(x.mean((2, 3, 4))[:, :3] @ w, 1),
        [seeded(*X5)],
        [seeded(3, 5)],
        mesh=place.mesh(),
        cuts=place.cuts_of(5),
    )


@pytest.mark.parametrize(
    "axes", [{}, {"depth": 2}, {"height": 3}, {"depth": 2, "width": 2}], ids=str
)
def test_gradients_pass_through_functions_of_whole_tensors(run, axes):
    run(Place(axes), check_whole_gradient)


def check_register(place):
    @hs.register(torch.special.entr, torch.Tensor.cumsum)
    def by_piece(x, dim=None):
        if dim is None:
            return x.with_local(torch.special.entr(x.local))
        if dim in x.layout.split_dims:
            raise hs.UnsupportedOp("not along a split dim")
        return x.with_local(x.local.cumsum(dim))

    mesh, cuts = place.mesh(), place.cuts_of(5)
    positive = seeded(*X5).abs() + 0.1
    assert_same_as_serial(torch.special.entr, [positive], mesh=mesh, cuts=cuts)
    assert_same_as_serial(lambda x: x.cumsum(1), [positive], mesh=mesh, cuts=cuts)
    with pytest.raises(hs.UnsupportedOp, match="not along a split dim"):
        hs.shard(positive, mesh, cuts=cuts).cumsum(2)

    @hs.register(torch.special.entr)
    def another(x):
        return "another rule"

    assert torch.special.entr(hs.shard(positive, mesh)) == "another rule"


def test_a_rule_can_be_added_and_replaced():
    with Team(2) as team:  # of its own: rules stay
        team.run(check_register, DEPTH)


def doubled(x):
    if torch.overrides.has_torch_function_unary(x):
        return torch.overrides.handle_torch_function(doubled, (x,), x)
    return 2 * x


def check_own_function(place):
    x = hs.shard(seeded(*X5), place.mesh())
    with pytest.raises(
        hs.UnsupportedOp, match=r"test_slab.doubled cannot run .*split over depth=2"
    ):
        doubled(x)


def test_a_function_of_the_users_own_is_named(run):
    run(DEPTH, check_own_function)


@pytest.mark.ranks(2)
def test_a_slab_is_no_container_to_tree_map_and_vmap():
    mesh = hs.init(depth=2, device="cpu")
    x = hs.shard(torch.ones(2, 1, 4, 4, 4), mesh)
    words = "a Slab is no container of tensors"
    for call in (
        lambda: tree_map(lambda v: v - v.mean(), [x]),
        lambda: torch.vmap(lambda v: v * v.shape[0])(x),
    ):
        with pytest.raises(hs.UnsupportedOp, match=words):
            call()
    (doubled,) = tree_map(lambda v: v * 2, [x], is_leaf=lambda v: isinstance(v, hs.Slab))
    assert float(doubled.mean()) == 2
    with pytest.raises(TypeError, match="cat joins a tuple or list"):
        torch.cat(x, 1)
