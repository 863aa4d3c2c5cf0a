"""Do published networks train on several ranks as they do in one process?

    python benchmarks/zoo.py                                # what is installed, on the CPU
    python benchmarks/zoo.py --library monai --filter UNet
    python benchmarks/zoo.py --device cuda --meshes split sample grid --jobs 6

Takes networks of MONAI, torchvision and timm unmodified, runs one training step (train mode,
float64, random weights) in one process and on a mesh of ranks, and compares the loss, the gradient
of every parameter and every buffer (running statistics among them). A network is the same, or is
refused by the name of the function that has no rule. Anything else is wrong, and the exit code 1.
"""

import argparse
import copy
import gc
import importlib.util
import json
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache, partial
from itertools import pairwise
from multiprocessing import get_context

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import hyperslab as hs
from hyperslab.testing import RankError, Team, whole

LEGEND = """\
Each row is one training step of the network as published: train mode, float64, weights and input
from a seed, 2 samples. The loss is the sum over all outputs (auxiliary heads too) of the mean of
the output times random numbers. Dropout, stochastic depth and drop-connect have their rate set to
0, since a Slab's masks are not those that plain torch draws. Parameters that get no gradient in
one process are frozen. Differences are the largest absolute ones, relative to the largest gradient
(or buffer) of the same layer, or to a millionth of the largest of all if that is more (before a
norm gradients are zero but for rounding); the loss's is relative to the loss. Variational
autoencoders are left out: their noise, too, is not what plain torch draws."""

TINY = 1e-300
TIMEOUT_SECONDS = 240.0


@dataclass(frozen=True)
class Network:
    """A published network, how to build it, and a small input."""

    library: str
    name: str
    build: Callable[[], nn.Module] = field(repr=False)
    shapes: tuple[tuple[int, ...], ...]
    """Of the inputs."""
    tolerance: float = 1e-8

    @property
    def key(self) -> str:
        return f"{self.library}/{self.name}"


# --- the networks -------------------------------------------------------------------------------


def monai_networks() -> Iterator[Network]:
    from monai.networks import nets

    def network(name, build, *shapes):
        return Network("monai", name, build, shapes)

    small, square, cube, tall = (4, 8, 16), (2, 3, 64, 64), (2, 1, 16, 16, 16), (2, 1, 32, 16, 16)
    large, pair = (2, 1, 32, 32, 32), (2, 2, 16, 16, 16)
    plain = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
    down = {"channels": small, "strides": (2, 2)}
    coder = {"channels": small, "strides": (1, 2, 2)}
    features = {"features": (4, 4, 8, 8, 16, 4)}
    levels = {"kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2)}
    residual = {"layers": [1, 1, 1, 1], "block_inplanes": [4, 8, 16, 32], "n_input_channels": 1}
    squeeze = {"spatial_dims": 3, "in_channels": 1, "layers": (1, 1, 1, 1), "num_classes": 3}
    moving = {"spatial_dims": 3, "in_channels": 2, "num_channel_initial": 4}
    patches = {"spatial_dims": 3, "in_channels": 1, "channels": 4, "num_layers_d": 2}
    decoder = {"decoder_channels": (32, 16, 8, 8, 4)}
    short = {"blocks_down": (1, 1, 1, 1), "blocks_up": (1, 1, 1, 1)}
    warped = (3, 2, 4, (4, 4, 8, 8), (4, 4))

    yield network("UNet", lambda: nets.UNet(**plain, **down, num_res_units=2), cube)
    yield network("UNet 2-d", lambda: nets.UNet(2, 3, 2, **down, norm="batch"), (2, 3, 32, 24))
    yield network("BasicUNet", lambda: nets.BasicUNet(**plain, **features), tall)
    yield network(
        "BasicUNet, upsampling",
        lambda: nets.BasicUNet(**plain, **features, upsample="nontrainable", norm="batch"),
        (2, 1, 33, 18, 17),
    )
    yield network(
        "BasicUNetPlusPlus",
        lambda: nets.BasicUNetPlusPlus(**plain, **features, deep_supervision=True),
        tall,
    )
    yield network("SegResNet", lambda: nets.SegResNet(**plain), cube)
    yield network(
        "SegResNet, deconv",
        lambda: nets.SegResNet(**plain, norm="batch", upsample_mode="deconv"),
        cube,
    )
    yield network(
        "SegResNet, pixel shuffle",
        lambda: nets.SegResNet(**plain, norm="instance", upsample_mode="pixelshuffle"),
        cube,
    )
    yield network("SegResNetDS", lambda: nets.SegResNetDS(**plain, init_filters=4, dsdepth=3), cube)
    yield network("SegResNetDS2", lambda: nets.SegResNetDS2(**plain, init_filters=4), cube)
    yield network(
        "DynUNet",
        lambda: nets.DynUNet(**plain, **levels, filters=small, deep_supervision=True),
        cube,
    )
    yield network(
        "DynUNet, residual",
        lambda: nets.DynUNet(
            **plain, **levels, filters=small, res_block=True, norm_name=("group", {"num_groups": 4})
        ),
        cube,
    )
    yield network("VNet", lambda: nets.VNet(**plain), cube)
    yield network("AttentionUnet", lambda: nets.AttentionUnet(**plain, **down), cube)
    yield network("HighResNet", lambda: nets.HighResNet(**plain), (2, 1, 12, 10, 10))
    yield network(
        "DenseNet",
        lambda: nets.DenseNet(3, 1, 3, init_features=8, growth_rate=4, block_config=(2, 2, 2)),
        (2, 1, 32, 24, 24),
    )
    yield network("DenseNet121 2-d", lambda: nets.DenseNet121(2, 3, 5), square)
    yield network("ResNet", lambda: nets.ResNet("basic", **residual, num_classes=3), tall)
    yield network(
        "ResNet, shortcut A",
        lambda: nets.ResNet("bottleneck", **residual, shortcut_type="A", conv1_t_stride=2),
        large,
    )
    yield network("resnet18 2-d", lambda: nets.resnet18(spatial_dims=2), (2, 3, 64, 48))
    yield network(
        "SENet154 2-d", lambda: nets.SENet154(**squeeze | {"spatial_dims": 2}), (2, 1, 64, 64)
    )
    yield network("SEResNet50", lambda: nets.SEResNet50(**squeeze), large)
    yield network("SEResNext50", lambda: nets.SEResNext50(**squeeze), large)
    yield network(
        "EfficientNetBN 2-d",
        lambda: nets.EfficientNetBN("efficientnet-b0", pretrained=False),
        square,
    )
    yield network(
        "EfficientNetBN",
        lambda: nets.EfficientNetBN("efficientnet-b0", pretrained=False, spatial_dims=3),
        (2, 3, 32, 32, 32),
    )
    yield network("RegUNet", lambda: nets.RegUNet(**moving, depth=2), pair)
    yield network("LocalNet", lambda: nets.LocalNet(**moving, extract_levels=(0, 1, 2)), pair)
    yield network(
        "FlexibleUNet, ResNet", lambda: nets.FlexibleUNet(3, 2, "resnet18", **decoder), square
    )
    yield network(
        "FlexibleUNet, EfficientNet",
        lambda: nets.FlexibleUNet(3, 2, "efficientnet-b0", **decoder),
        square,
    )
    yield network(
        "AutoEncoder",
        lambda: nets.AutoEncoder(**plain, **coder, inter_channels=[16], inter_dilations=[2]),
        cube,
    )
    yield network("Classifier", lambda: nets.Classifier((1, 16, 16, 16), 3, **down), cube)
    yield network("Regressor", lambda: nets.Regressor((1, 16, 16, 16), (2, 3), **down), cube)
    yield network("Discriminator", lambda: nets.Discriminator((1, 16, 16, 16), **down), cube)
    yield network("Critic", lambda: nets.Critic((1, 16, 16, 16), **down), cube)
    yield network("Generator", lambda: nets.Generator((8,), (16, 4, 4, 4), (8, 4), (2, 2)), (2, 8))
    yield network("DiNTS", lambda: dints(nets), tall)
    yield network(
        "MedNeXt",
        lambda: nets.MedNeXt(
            **plain,
            init_filters=4,
            kernel_size=3,
            deep_supervision=True,
            use_residual_connection=True,
        ),
        tall,
    )
    yield network(
        "MedNeXt, response norm",
        lambda: nets.MedNeXt(
            **plain, **short, init_filters=4, kernel_size=5, global_resp_norm=True
        ),
        tall,
    )
    yield network("Quicknat 2-d", lambda: nets.Quicknat(3, 1, 8), (2, 1, 64, 32))
    yield network("AHNet", lambda: nets.AHNet((1, 1, 1, 1), 3, 1, 2, psp_block_num=2), large)
    yield network("PatchDiscriminator", lambda: nets.PatchDiscriminator(**patches), tall)
    yield network(
        "MultiScalePatchDiscriminator",
        lambda: nets.MultiScalePatchDiscriminator(num_d=2, **patches, minimum_size_im=32),
        large,
    )
    yield network("VoxelMorphUNet", lambda: nets.VoxelMorphUNet(*warped), pair)
    yield network(
        "VoxelMorph", lambda: nets.VoxelMorph(nets.VoxelMorphUNet(*warped), 2), cube, cube
    )
    yield network(
        "SPADENet 2-d",
        lambda: nets.SPADENet(2, 1, 1, 3, (32, 32), [8, 16], 4, False, 4),
        (2, 3, 32, 32),
    )


def dints(nets):
    blocks, depths = 2, 3
    paths, operations = np.ones((blocks, 3 * depths - 2)), np.ones((blocks, 3 * depths - 2))
    space = nets.TopologyInstance([paths, operations], 0.125, num_blocks=blocks, num_depths=depths)
    return nets.DiNTS(space, 1, 2, node_a=np.ones((blocks + 1, depths)))


TORCHVISION = {
    "r3d_18 mc3_18 r2plus1d_18": (2, 3, 16, 32, 32),
    "s3d": (2, 3, 16, 224, 224),
    """
    alexnet vgg11_bn squeezenet1_1 resnet18 resnet50 resnext50_32x4d wide_resnet50_2 densenet121
    googlenet mobilenet_v2 mobilenet_v3_small mobilenet_v3_large shufflenet_v2_x1_0 mnasnet1_0
    efficientnet_b0 efficientnet_v2_s regnet_y_400mf regnet_x_400mf convnext_tiny
    """: (2, 3, 96, 64),
    "inception_v3": (2, 3, 299, 299),
    """
    fcn_resnet50 deeplabv3_resnet50 deeplabv3_mobilenet_v3_large lraspp_mobilenet_v3_large
    """: (2, 3, 64, 64),
}
SEGMENTATION = ("fcn", "deeplab", "lraspp")

TIMM = {
    """
    resnet18 resnet26d resnext50_32x4d seresnet18 ecaresnet26t resnetblur18 resnetaa34d
    resnetv2_50 convnext_atto convnext_atto_ols convnextv2_atto efficientnet_b0 efficientnet_lite0
    tf_efficientnet_b0 tf_efficientnetv2_b0 efficientnetv2_rw_t mixnet_s mobilenetv2_100
    mobilenetv3_small_100 mobilenetv3_large_100 mobilenetv4_conv_small hardcorenas_a fbnetc_100
    mnasnet_100 spnasnet_100 lcnet_050 tinynet_e semnasnet_075 regnetx_002 regnety_002 regnetv_040
    densenet121 densenetblur121d inception_next_atto xception41 legacy_xception ghostnet_050
    ghostnetv2_100 repghostnet_050 repvgg_a0 nfnet_l0 dm_nfnet_f0 eca_nfnet_l0 rexnet_100
    hrnet_w18_small dla34 dla46x_c vovnet39a ese_vovnet19b_dw cspresnet50 cspdarknet53 darknet53
    dpn48b dpn68 res2net50_26w_4s res2next50 skresnet18 resnest14d selecsls42b tresnet_m gernet_s
    hgnet_tiny hgnetv2_b0 vgg11_bn mobileone_s0 starnet_s1 fasternet_t0 rdnet_tiny
    legacy_seresnet18 gcresnext26ts resnetrs50 resnet51q nf_regnet_b0 regnetz_005
    cs3darknet_s mambaout_femto repvit_m0_9 fastvit_t8 swiftformer_xs efficientvit_b0 shvit_s1
    nextvit_small focalnet_tiny_srf edgenext_xx_small mobilevit_xxs poolformer_s12
    """: (2, 3, 96, 64),
    "inception_v3 inception_v4 inception_resnet_v2": (2, 3, 128, 96),
    "botnet26t_256 halonet26t lambda_resnet26t bat_resnext26ts": (2, 3, 256, 256),
    "efficientformerv2_s0": (2, 3, 224, 224),
}
TIMM_IN_FLOAT32 = ("efficientvit_b0",)
"""They turn some activations into float32, whatever the input is."""
TIMM_BACKBONES = ("resnet18", "convnext_atto", "mobilenetv3_small_100")


def torchvision_networks() -> Iterator[Network]:
    for names, shape in TORCHVISION.items():
        for name in names.split():
            yield Network("torchvision", name, partial(torchvision_model, name), (shape,))


def torchvision_model(name: str) -> nn.Module:
    from torchvision.models import get_model

    if not name.startswith(SEGMENTATION):
        return get_model(name, weights=None, num_classes=10)
    auxiliary = {} if name.startswith("lraspp") else {"aux_loss": True}
    return get_model(name, weights=None, weights_backbone=None, num_classes=4, **auxiliary)


def timm_networks() -> Iterator[Network]:
    import timm

    for names, shape in TIMM.items():
        for name in names.split():
            build = partial(timm.create_model, name, num_classes=10)
            tolerance = 1e-4 if name in TIMM_IN_FLOAT32 else Network.tolerance
            yield Network("timm", name, build, (shape,), tolerance)
    for name in TIMM_BACKBONES:
        yield Network("timm", f"U-Net on {name}", partial(Decoded, name), ((2, 3, 96, 64),))


class Decoded(nn.Module):
    """timm's features at all scales, decoded to the input's size as in a U-Net."""

    def __init__(self, backbone: str) -> None:
        import timm

        super().__init__()
        self.encoder = timm.create_model(backbone, features_only=True)
        *skips, deepest = self.encoder.feature_info.channels()
        wide = [deepest, *reversed(skips)]
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(above + skip, skip, 3, padding=1, bias=False),
                nn.BatchNorm2d(skip),
                nn.ReLU(),
            )
            for above, skip in pairwise(wide)
        )
        self.head = nn.Conv2d(wide[-1], 2, 1)

    def forward(self, x):
        size = x.shape[-2:]
        *skips, x = self.encoder(x)
        for block, skip in zip(self.blocks, reversed(skips), strict=True):
            x = nn.functional.interpolate(x, skip.shape[-2:], mode="bilinear", align_corners=False)
            x = block(torch.cat([x, skip], 1))
        return nn.functional.interpolate(self.head(x), size, mode="bilinear", align_corners=False)


LIBRARIES = {
    "monai": monai_networks,
    "torchvision": torchvision_networks,
    "timm": timm_networks,
}


@cache
def networks(library: str) -> dict[str, Network]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {network.key: network for network in LIBRARIES[library]()}


def find(key: str) -> Network:
    return networks(key.partition("/")[0])[key]


# --- one training step, twice -------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A mesh, and where it cuts the inputs."""

    axes: dict[str, int]
    cuts: dict[str, list[int]] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return math.prod(self.axes.values())

    def __str__(self) -> str:
        shown = [f"{axis}={size}" for axis, size in self.axes.items()]
        cuts = [f" at {bounds[1]}" for bounds in self.cuts.values()]
        return " x ".join(shown) + "".join(cuts)


def place(mesh: str, shape: tuple[int, ...]) -> Place:
    """What ``mesh`` is for an input of ``shape``: 3-d ones are split along depth, others height."""
    axes = ("depth", "height", "width")[{5: 0, 4: 1, 3: 2}.get(len(shape), 0) :]
    kinds = {
        "split": {axes[0]: 2},
        "channel": {"channel": 2},
        "both": {"channel": 2, axes[0]: 2},
        "uneven": {axes[0]: 2},
        "sample": {"sample": 2},
        "grid": {"sample": 2, axes[0]: 2},
        "corner": dict.fromkeys(axes[:2], 2),
    }
    if mesh != "uneven" or len(shape) < 3:
        return Place(kinds[mesh])
    return Place(kinds[mesh], {axes[0]: [0, shape[2] * 5 // 8 + 1, shape[2]]})


MESHES = ("split", "uneven", "sample", "grid", "corner", "channel", "both")


@dataclass(frozen=True)
class Step:
    """What one training step of one process leaves behind."""

    model: nn.Module
    """As it was before."""
    inputs: list[Tensor]
    loss: float
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]


@lru_cache(maxsize=1)
def step_in_one_process(key: str, device: str) -> Step:
    """The step that all meshes are compared with; raises what plain torch raises."""
    network = find(key)
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    model = network.build().double().to(device).train()
    remove_chance(model)
    inputs = [torch.randn(shape, dtype=torch.float64).to(device) for shape in network.shapes]
    before = copy.deepcopy(model)
    loss = loss_of(model(*[x.clone() for x in inputs]))
    assert loss.isfinite(), "the loss is not finite"
    loss.backward()
    for fresh, used in zip(before.parameters(), model.parameters(), strict=True):
        fresh.requires_grad_(used.grad is not None)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Step(before, inputs, loss.item(), grads, dict(model.named_buffers()))


RATES = ("drop_prob", "drop_rate", "drop_path_rate", "drop_connect_rate")
"""What libraries call the rates of random layers that are not torch's own dropout."""


def remove_chance(model: nn.Module) -> None:
    for module in model.modules():
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd)
        if is_dropout or type(module).__name__ == "StochasticDepth":  # torchvision's
            module.p = 0.0
        for name in RATES:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def loss_of(outputs) -> Tensor:
    """A loss on which every element of every output has an influence of its own."""
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros(())
    for out in tree_leaves(outputs, is_leaf=lambda leaf: isinstance(leaf, hs.Slab)):
        if isinstance(out, Tensor | hs.Slab) and out.is_floating_point() and out.requires_grad:
            random = torch.randn(out.shape, generator=generator, dtype=out.dtype).to(out.device)
            total = total.to(out.device) + (out * random).mean()
    return total


@dataclass(frozen=True)
class Row:
    """One network on one mesh."""

    library: str
    name: str
    shape: str
    mesh: str
    verdict: str
    """``same``, ``refused``, ``not run`` (nor in one process), ``WRONG`` or ``FAILED``."""
    why: str = ""
    parameters: int = 0
    loss: float | None = None
    grads: float | None = None
    buffers: float | None = None
    worst: str = ""
    """The parameter whose gradient differs most."""
    seconds: float = 0.0


def compare(row: Row, where: Place, device: str, compiled: bool = False) -> Row:
    """``row`` with its verdict. Collective: every rank of the mesh calls it."""
    key = f"{row.library}/{row.name}"
    try:
        serial = step_in_one_process(key, device)
    except Exception as error:  # noqa: BLE001 - a network that plain torch cannot run says nothing
        return replace(row, verdict="not run", why=summary(error))
    row = replace(row, parameters=sum(p.numel() for p in serial.model.parameters()))
    gc.collect()
    torch.cuda.empty_cache()  # the ranks of other networks share the GPU
    mesh = hs.init(**where.axes, device=device, timeout_seconds=TIMEOUT_SECONDS / 2)
    model = hs.parallelize(copy.deepcopy(serial.model), mesh)
    step = torch.compile(model, backend="aot_eager") if compiled else model
    try:
        loss = loss_of(step(*[hs.shard(x, mesh, cuts=cuts_of(x, where)) for x in serial.inputs]))
        loss.backward()
    except hs.UnsupportedOp as error:
        return replace(row, verdict="refused", why=summary(error))
    grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}
    errors = relative_errors(grads, serial.grads)
    worst = max(errors, key=errors.get, default="")
    row = replace(
        row,
        loss=abs(loss.item() - serial.loss) / abs(serial.loss),
        grads=errors.get(worst, 0.0),
        worst=worst,
        buffers=max(
            relative_errors(
                {name: whole(buffer) for name, buffer in model.named_buffers()}, serial.buffers
            ).values(),
            default=0.0,
        ),
    )
    tolerance = find(key).tolerance
    same = all(error < tolerance for error in (row.loss, row.grads, row.buffers))
    return replace(row, verdict="same" if same else "WRONG")


def cuts_of(x: Tensor, where: Place) -> dict[str, list[int]]:
    return {
        axis: bounds for axis, bounds in where.cuts.items() if axis in hs.layout.DIM_AXES[x.ndim]
    }


def relative_errors(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """By name, relative to the largest element that the same layer expects.

    Not to a tensor's own: the gradient of a bias before a norm is zero but for rounding. So may be
    that of a layer: no less than a millionth of the largest element of all counts.
    """
    assert ours.keys() == expected.keys(), ours.keys() ^ expected.keys()
    sizes = {name: largest(tensor) for name, tensor in expected.items()}
    smallest = 1e-6 * max(sizes.values(), default=0.0)
    layers: dict[str, float] = {}
    for name, size in sizes.items():
        layer = name.rpartition(".")[0]
        layers[layer] = max(layers.get(layer, smallest), size)
    return {
        name: largest(ours[name] - tensor) / max(layers[name.rpartition(".")[0]], TINY)
        for name, tensor in expected.items()
    }


def largest(tensor: Tensor) -> float:
    return tensor.double().abs().max().item() if tensor.numel() else 0.0


def summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


# --- all networks, on all meshes ----------------------------------------------------------------


def run(
    key: str, mesh: str, device: str, team_of: Callable[[int], Team], *, compiled: bool = False
) -> Row:
    """The network ``key`` on ``mesh``, on ranks of ``team_of(their number)``."""
    network = find(key)
    shape = ", ".join("x".join(map(str, shape)) for shape in network.shapes)
    where = place(mesh, network.shapes[0])
    row = Row(network.library, network.name, shape, str(where), "FAILED")
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ranks take over the filters
            rows = team_of(where.num_ranks).run(compare, row, where, device, compiled)
    except RankError as error:
        rows = [replace(row, why=str(error))]
    if len(verdicts := {each.verdict for each in rows}) > 1:
        rows = [replace(row, why=f"the ranks do not agree: {sorted(verdicts)}")]
    return replace(max(rows, key=gradient_error), seconds=time.perf_counter() - start)


def gradient_error(row: Row) -> float:
    return row.grads or 0.0


@cache
def team_of(num_ranks: int) -> Team:
    """Ranks that this process keeps between networks."""
    return Team(num_ranks, TIMEOUT_SECONDS)


def run_meshes(key: str, meshes: list[str], device: str) -> list[Row]:
    return [run(key, mesh, device, team_of) for mesh in meshes]


def refused_function(why: str) -> str:
    """The function that an ``UnsupportedOp`` names."""
    return why.removeprefix("UnsupportedOp: ").split()[0]


def table_of(rows: list[Row]) -> Table:
    table = Table(title="Published networks, one training step against one process")
    for header in ("network", "library", "input", "mesh"):
        table.add_column(header)
    for header in ("params M", "loss", "gradients", "buffers"):
        table.add_column(header, justify="right")
    table.add_column("verdict")
    table.add_column("s", justify="right")
    for row in rows:
        errors = [
            "" if error is None else f"{error:.0e}" for error in (row.loss, row.grads, row.buffers)
        ]
        table.add_row(
            row.name,
            row.library,
            row.shape,
            row.mesh,
            f"{row.parameters / 1e6:.2f}",
            *errors,
            told(row),
            f"{row.seconds:.1f}",
        )
    return table


def told(row: Row) -> str:
    """The verdict and what it is about, in one line."""
    if row.verdict == "same":
        return "[green]same[/]"
    if row.verdict == "refused":
        return f"[yellow]refused[/]: {refused_function(row.why)}"
    about = row.worst if row.verdict == "WRONG" else row.why.partition("\n")[0][:120]
    return f"[red]{row.verdict}[/]: {escape(about)}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    installed = [name for name in LIBRARIES if importlib.util.find_spec(name)]
    parser.add_argument("--library", nargs="+", choices=list(LIBRARIES), default=installed)
    parser.add_argument("--filter", default="", help="a regular expression on names")
    parser.add_argument("--meshes", nargs="+", choices=MESHES, default=["split", "sample"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--json", action="store_true", help="print JSON only")
    options = parser.parse_args()
    keys = [
        key
        for library in options.library
        for key in networks(library)
        if re.search(options.filter, key)
    ]
    progress = Console(stderr=True)
    rows: dict[str, list[Row]] = {}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        tasks = {pool.submit(run_meshes, key, options.meshes, options.device): key for key in keys}
        for task in as_completed(tasks):
            rows[tasks[task]] = task.result()
            for row in rows[tasks[task]]:
                progress.print(
                    f"{len(rows)}/{len(keys)} {row.library} {row.name}, {row.mesh}: {told(row)}"
                )
    in_order = [row for key in keys for row in rows[key]]
    wrong = [row for row in in_order if row.verdict in ("WRONG", "FAILED")]
    if options.json:
        print(json.dumps([asdict(row) for row in in_order], indent=1))
    else:
        console = Console(width=None if sys.stdout.isatty() else 200)
        console.print(table_of(in_order))
        console.print(LEGEND)
        for row in wrong:
            console.print(
                f"\n{row.verdict}: {row.name} on {row.mesh}\n{row.why or row.worst}", markup=False
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
