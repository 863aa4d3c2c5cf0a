"""Wrong convolutions of the GPU are found, remembered, and not used."""

import json
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hyperslab as hs
from hyperslab.comm import join
from hyperslab.kernels import conv_check, tiles, torch_conv
from hyperslab.kernels.conv_check import LAYOUTS, PASSES, PRECISIONS, Verdict, measure

CPU = torch.device("cpu")
ALL = [f"{p} {layout} {name}" for p in PRECISIONS for layout in LAYOUTS for name in PASSES]


def wrong_in(dtype, memory_format, which, spoil):
    """torch's convolution, but for one of its three results."""

    def convolve(x, weight, grad):
        found = list(conv_check.convolve(x, weight, grad))
        if x.dtype == dtype and x.is_contiguous(memory_format=memory_format):
            found[which] = spoil(found[which])
        return tuple(found)

    return convolve


def nan_in_a_corner(x):
    x[0, 0, 0, 0, 0] = float("nan")
    return x


def last_plane_left_out(x):
    x[:, :, -1] = 0
    return x


# Measuring


def test_what_is_right_is_found_right():
    verdict = measure(CPU)
    assert sorted(verdict.errors) == sorted(ALL)
    assert verdict.wrong == ()
    assert max(verdict.errors.values()) < conv_check.TOLERANCE / 4


@pytest.mark.parametrize("spoil", [torch.neg, nan_in_a_corner, last_plane_left_out])
@pytest.mark.parametrize("which", range(3))
def test_what_is_wrong_is_found_by_name(which, spoil):
    convolve = wrong_in(torch.bfloat16, torch.channels_last_3d, which, spoil)
    assert measure(CPU, convolve).wrong == (f"bf16 channels_last {PASSES[which]}",)


def test_tf32_is_told_from_float32():
    def convolve(x, weight, grad):
        found = conv_check.convolve(x, weight, grad)
        is_tf32 = x.dtype == torch.float32 and torch.backends.cudnn.conv.fp32_precision == "tf32"
        return tuple(-each for each in found) if is_tf32 else found

    before = torch.backends.cudnn.conv.fp32_precision
    wrong = measure(CPU, convolve).wrong
    assert wrong == tuple(name for name in ALL if name.startswith("tf32"))
    assert torch.backends.cudnn.conv.fp32_precision == before


def test_what_raises_is_not_silently_wrong():
    def convolve(x, weight, grad):
        if x.dtype == torch.bfloat16:
            raise RuntimeError("not supported on this GPU")
        return conv_check.convolve(x, weight, grad)

    verdict = measure(CPU, convolve)
    assert verdict.wrong == ()
    assert not any("bf16" in name for name in verdict.errors)


def test_what_the_user_has_set_changes_nothing():
    torch.backends.cudnn.benchmark = True
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            assert measure(CPU).wrong == ()
        assert torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = False


# Remembering


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """How often was measured, on a machine that has kept nothing yet."""
    calls = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def counted(device):
        calls.append(device)
        return Verdict({"bf16 contiguous forward": float("inf"), "fp16 contiguous forward": 0}, 1.5)

    monkeypatch.setattr(conv_check, "measure", counted)
    conv_check.verdict_of.cache_clear()
    yield calls
    conv_check.verdict_of.cache_clear()


def asked_anew():
    """What a new process would find."""
    conv_check.verdict_of.cache_clear()
    return conv_check.verdict_of(CPU)


def kept(tmp_path):
    (path,) = (tmp_path / "cache/hyperslab").iterdir()
    return path


def test_a_verdict_is_made_once(measured, tmp_path):
    first = asked_anew()
    assert first.wrong == ("bf16 contiguous forward",)
    assert asked_anew() == first
    assert conv_check.verdict_of(CPU) == first
    assert len(measured) == 1
    assert kept(tmp_path).name.startswith("convolutions-")


def test_another_gpu_cudnn_torch_or_check_has_a_verdict_of_its_own(measured, monkeypatch):
    asked_anew()
    monkeypatch.setattr(conv_check, "describe", lambda device: "another GPU")
    asked_anew()
    monkeypatch.setattr(conv_check, "VERSION", 2)
    asked_anew()
    asked_anew()
    assert len(measured) == 3


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00",
        b"[]",
        b"{}",
        b'{"version": 1, "about": "x", "seconds": 1, "errors": {}}',
        b'{"version": 1, "about": "THIS", "seconds": 1, "errors": {"a": "b"}}',
        b'{"version": 1, "about": "THIS", "seconds": null, "errors": {}}',
        b'{"version": 1, "about": "THIS", "seconds": 1, "errors": [1]}',
    ],
)
def test_a_file_that_makes_no_sense_is_measured_again(measured, tmp_path, content):
    asked_anew()
    path = kept(tmp_path)
    path.write_bytes(content.replace(b"THIS", json.loads(path.read_text())["about"].encode()))
    assert asked_anew().wrong == ("bf16 contiguous forward",)
    assert asked_anew().wrong == ("bf16 contiguous forward",)
    assert len(measured) == 2


def test_without_a_place_to_keep_it_a_verdict_is_made_anew(measured, tmp_path):
    (tmp_path / "cache").write_text("a file, and no folder")
    assert asked_anew() == asked_anew()
    assert len(measured) == 2


def out_of_memory(device):
    raise torch.OutOfMemoryError("full")


@pytest.mark.parametrize("measure", [out_of_memory, lambda device: Verdict({}, 0.1)])
def test_what_could_not_be_measured_is_not_remembered(measured, monkeypatch, tmp_path, measure):
    monkeypatch.setattr(conv_check, "measure", measure)
    assert asked_anew().wrong == ()
    assert not (tmp_path / "cache").exists()


def test_nothing_is_looked_for_on_cpus_or_where_the_user_says_so(measured, monkeypatch):
    monkeypatch.setattr(conv_check, "describe", lambda device: "a GPU")
    assert conv_check.find_wrong(CPU) == ()
    monkeypatch.setenv("HYPERSLAB_CONV_CHECK", "0")
    assert conv_check.find_wrong(torch.device("cuda")) == ()
    assert measured == []
    monkeypatch.delenv("HYPERSLAB_CONV_CHECK")
    assert conv_check.find_wrong(torch.device("cuda")) == ("bf16 contiguous forward",)


# Not using


class Spoiled(TorchDispatchMode):
    """Within it, torch's 3-d convolutions in some dtypes are wrong; tells how others were run."""

    def __init__(self, *dtypes):
        super().__init__()
        self.dtypes, self.seen = dtypes, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function not in (
            torch.ops.aten.convolution.default,
            torch.ops.aten.convolution_backward.default,
        ):
            return found
        cudnn = torch.backends.cudnn
        self.seen.add((args[0].dtype, cudnn.conv.fp32_precision, cudnn.enabled))
        if args[0].dtype not in self.dtypes:
            return found
        several = found if isinstance(found, tuple) else (found,)
        spoiled = tuple(None if each is None else each + 1 for each in several)
        return spoiled if isinstance(found, tuple) else spoiled[0]


@contextmanager
def avoiding(*names, device=CPU):
    """Within it, nothing else is avoided, whatever it does."""
    try:
        torch_conv.avoid(names, device, "this machine", tell=True)
        yield
    finally:
        torch_conv._wrong.clear()
        torch_conv._device_type = "cuda"


def seeded(*shape, dtype=torch.bfloat16, last=False):
    generator = torch.Generator().manual_seed(sum(shape))
    found = torch.randint(-2, 3, shape, generator=generator).to(dtype)
    return found.contiguous(memory_format=torch.channels_last_3d) if last else found


def results(run, x, weight):
    """The output and both gradients, as float64."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = run(x, weight)
    out = hs.gather(out) if isinstance(out, hs.Slab) else out
    out.backward(seeded(*out.shape, dtype=out.dtype).to(out.device))
    return [each.double() for each in (out.detach(), x.grad, weight.grad)]


def due(function, x, weight, **how):
    return results(lambda x, w: function(x, w, **how), x.double(), weight.double())


def on_slabs(function, mesh, **how):
    return lambda x, weight: function(hs.shard(x, mesh), weight, **how)


def assert_right(ours, exact):
    for each, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(each, other, rtol=2**-7, atol=2**-7 * other.abs().max().item())


CALLS = {
    "conv": (F.conv3d, (3, 4, 3, 3, 3), {"padding": 1}),
    "same": (F.conv3d, (3, 4, 3, 3, 3), {"padding": "same"}),
    "strided": (F.conv3d, (3, 4, 3, 3, 3), {"stride": 2, "dilation": 2}),
    "transposed": (F.conv_transpose3d, (4, 3, 3, 3, 3), {"stride": 2, "output_padding": 1}),
}


@pytest.mark.parametrize(
    ("dtype", "max_numel"),
    [
        (torch.bfloat16, tiles.MAX_NUMEL),
        (torch.float16, tiles.MAX_NUMEL),
        (torch.bfloat16, 2000),
    ],
)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_what_is_wrong_is_computed_in_float32(call, dtype, last, max_numel, monkeypatch):
    function, weight_shape, how = CALLS[call]
    monkeypatch.setattr(tiles, "MAX_NUMEL", max_numel)
    monkeypatch.setattr(tiles, "TILE_NUMEL", max_numel)
    x, weight = seeded(2, 4, 7, 6, 8, dtype=dtype, last=last), seeded(*weight_shape, dtype=dtype)
    exact, run = due(function, x, weight, **how), on_slabs(function, hs.init(device="cpu"), **how)
    with Spoiled(dtype):
        wrong = results(run, x, weight)
    with pytest.raises(AssertionError):
        assert_right(wrong, exact)
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    with avoiding(*(f"{name} {layout} input gradient" for layout in LAYOUTS)), Spoiled(dtype):
        ours = results(run, x, weight)
    assert_right(ours, exact)


def test_what_is_right_stays_as_it_is():
    run = on_slabs(F.conv3d, hs.init(device="cpu"), padding=1)
    for x, expected in (
        (seeded(2, 4, 7, 6, 8), torch.bfloat16),
        (seeded(2, 4, 7, 6, 8, last=True), torch.float32),
        (seeded(2, 4, 7, 6, 8, dtype=torch.float16, last=True), torch.float16),
    ):
        with avoiding("bf16 channels_last forward"), Spoiled() as calls:
            results(run, x, seeded(3, 4, 3, 3, 3, dtype=x.dtype))
        assert {dtype for dtype, *_ in calls.seen} == {expected}


@pytest.mark.parametrize(
    ("x", "is_last"),
    [
        (seeded(2, 4, 7, 6, 8), False),
        (seeded(2, 4, 7, 6, 8)[:, 1:3, :, 2:4], False),
        (seeded(2, 4, 7, 6, 8, last=True), True),
        (seeded(2, 4, 7, 6, 8, last=True)[:, 1:3, :, 2:4], True),
        (seeded(2, 1, 7, 6, 8), False),
        (torch.empty_strided((2, 1, 7, 6, 8), (336, 1, 48, 8, 1)), True),
        (seeded(1, 1, 1, 1, 1), False),
        (seeded(1, 4, 1, 1, 1), False),
        (torch.zeros(1).expand(2, 4, 7, 6, 8), False),
    ],
)
def test_the_memory_format_is_that_in_which_torch_calls_cudnn(x, is_last):
    plain = seeded(3, 4, 3, 3, 3)
    layout = "channels_last" if is_last else "contiguous"
    assert torch_conv._layout(x, plain) == torch_conv._layout(plain, x) == layout


def test_tf32_that_is_wrong_is_switched_off_for_the_call():
    run = on_slabs(F.conv3d, hs.init(device="cpu"), padding=1)
    x, weight = seeded(2, 4, 7, 6, 8, dtype=torch.float32), seeded(3, 4, 3, 3, 3).float()
    with avoiding("tf32 contiguous forward"), conv_check.fp32_precision("tf32"):
        with Spoiled() as calls:
            ours = results(run, x, weight)
        assert torch.backends.cudnn.conv.fp32_precision == "tf32"
    assert_right(ours, due(F.conv3d, x, weight, padding=1))
    assert calls.seen == {(torch.float32, "ieee", True)}


def test_float32_that_is_wrong_is_computed_without_cudnn():
    run = on_slabs(F.conv3d, hs.init(device="cpu"), padding=1)
    x, weight = seeded(2, 4, 7, 6, 8), seeded(3, 4, 3, 3, 3)
    wrong = "bf16 contiguous forward", "float32 contiguous forward"
    with avoiding(*wrong), Spoiled() as calls:
        ours = results(run, x, weight)
    assert_right(ours, due(F.conv3d, x, weight, padding=1))
    assert {(dtype, enabled) for dtype, _, enabled in calls.seen} == {(torch.float32, False)}
    assert torch.backends.cudnn.enabled


def test_autocast_to_a_wrong_dtype_is_noticed():
    mesh = hs.init(device="cpu")
    x, weight = seeded(2, 4, 7, 6, 8, dtype=torch.float32), seeded(3, 4, 3, 3, 3).float()

    def run(x, weight):
        with torch.autocast("cpu", torch.bfloat16):
            return F.conv3d(hs.shard(x, mesh), weight, padding=1)

    with avoiding("bf16 contiguous forward"), Spoiled(torch.bfloat16):
        ours = results(run, x, weight)
    assert_right(ours, due(F.conv3d, x, weight, padding=1))


def test_gradients_of_gradients_are_right():
    def second(run):
        x, weight = (
            each.requires_grad_() for each in (seeded(1, 2, 5, 4, 4), seeded(3, 2, 3, 3, 3))
        )
        out = run(x, weight)
        out = hs.gather(out) if isinstance(out, hs.Slab) else out
        (first,) = torch.autograd.grad((out.double() ** 2).sum(), x, create_graph=True)
        return torch.autograd.grad((first.double() ** 2).sum(), weight)[0].double()

    exact = second(lambda x, weight: F.conv3d(x.double(), weight.double()))
    with avoiding("bf16 contiguous forward"), Spoiled(torch.bfloat16):
        ours = second(on_slabs(F.conv3d, hs.init(device="cpu")))
    torch.testing.assert_close(ours, exact, rtol=0.05, atol=0.02 * exact.abs().max().item())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("min_interior", [0, 1 << 40])
def test_ranks_that_share_a_sample_do_without_it_too(min_interior):
    with pytest.MonkeyPatch.context() as monkeypatch:
        from hyperslab.dist_ops import choices

        monkeypatch.setattr(choices, "MIN_INTERIOR_NUMEL", min_interior)
        mesh = hs.init(depth=2, device="cpu")
        x, weight = seeded(2, 4, 9, 6, 8), seeded(3, 4, 3, 3, 3)
        with avoiding("bf16 contiguous forward"), Spoiled(torch.bfloat16) as calls:
            out = F.conv3d(hs.shard(x, mesh), weight, padding=1)
            ours = hs.gather(out).double()
        assert_right([ours], [F.conv3d(x.double(), weight.double(), padding=1)])
        assert {dtype for dtype, *_ in calls.seen} == {torch.float32}


def test_passes_of_a_module_on_one_rank_do_without_it_too():
    mesh, x = hs.init(device="cpu"), seeded(1, 2, 5, 5, 5)
    conv = nn.Conv3d(2, 3, 3).bfloat16()
    exact = F.conv3d(x.double(), conv.weight.double(), conv.bias.double())
    net = hs.parallelize(nn.Sequential(conv), mesh)
    with avoiding("bf16 contiguous forward"), Spoiled(torch.bfloat16) as calls:
        for _ in range(3):
            assert_right([hs.gather(net(hs.shard(x, mesh))).double()], [exact])
    assert {dtype for dtype, *_ in calls.seen} == {torch.float32}


def test_a_compiled_model_is_right():
    mesh = hs.init(device="cpu")
    x, weight = seeded(1, 2, 5, 5, 5), seeded(3, 2, 3, 3, 3)
    compiled = torch.compile(lambda x, w: F.conv3d(x, w), backend="aot_eager", fullgraph=True)
    exact = F.conv3d(x.double(), weight.double())
    with avoiding("bf16 contiguous forward"):
        ours = hs.gather(compiled(hs.shard(x, mesh), weight)).double()
    assert_right([ours], [exact])


# Telling


def test_it_is_told_in_one_line_and_once(caplog):
    with avoiding(*ALL[:5]):
        torch_conv.avoid(ALL[:4], CPU, "this machine", tell=True)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "3-d convolutions of this machine are wrong in bf16 channels_last forward, "
        "bf16 channels_last input gradient, bf16 contiguous forward and 2 more: they are computed"
    )


@pytest.mark.ranks(2)
def test_what_is_wrong_on_one_rank_is_used_by_none():
    with pytest.MonkeyPatch.context() as monkeypatch:
        lines = []
        monkeypatch.setattr(torch_conv._log, "warning", lambda *words: lines.append(words))
        hs.init(depth=2, device="cpu")
        assert not torch_conv.avoids_any()
        is_wrong = torch.distributed.get_rank() == 1
        wrong = ("bf16 contiguous forward",) if is_wrong else ()
        monkeypatch.setattr(join, "find_wrong", lambda device: wrong)
        with avoiding():
            mesh = hs.init(depth=2, device="cpu")
            assert torch_conv.is_avoided(seeded(1, 2, 5, 5, 5), seeded(3, 2, 3, 3, 3))
        assert len(lines) == (mesh.rank == 0)


# On a GPU


@pytest.mark.gpu
def test_this_gpu_is_checked_in_two_seconds(tmp_path, run_python):
    """In a process of its own, which has loaded CUDA and cuDNN."""
    code = """
import torch
from hyperslab.kernels import conv_check
device = torch.device("cuda", 0)
ones = torch.ones(1, 3, 3, 3, device=device)
torch.nn.functional.conv2d(ones, ones)
torch.cuda.synchronize()
with torch.autocast("cuda", torch.float16):
    verdict = conv_check.measure(device)
print(conv_check.describe(device), verdict)
assert not verdict.wrong, verdict.wrong
assert len(verdict.errors) == 24
assert verdict.seconds < 2
"""
    (tmp_path / "check.py").write_text(code)
    done = run_python("check.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)


@pytest.mark.gpu
@pytest.mark.parametrize("last", [False, True])
def test_a_gpu_does_without_what_is_wrong(last):
    mesh = hs.init(device="cuda")
    x, weight = seeded(2, 4, 7, 6, 8, last=last).cuda(), seeded(3, 4, 3, 3, 3).cuda()
    run = on_slabs(F.conv3d, mesh, padding=1)
    names = [f"bf16 {layout} forward" for layout in LAYOUTS]
    with avoiding(*names, device=mesh.device), Spoiled(torch.bfloat16) as calls:
        ours = results(run, x, weight)
    assert_right(ours, [each.cuda() for each in due(F.conv3d, x.cpu(), weight.cpu(), padding=1)])
    assert {dtype for dtype, *_ in calls.seen} == {torch.float32}
