"""The networks and batches that are measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperslab.models import CosmoFlow, ResNet50, UNet3d
from hyperslab.models.mesh_tangling import mesh_2k

Options = Mapping[str, Any]
"""Of ``parallelize``."""
LEAN: Options = {"depth_first": ["features.0-1"]}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network and a batch for it."""

    make: partial[nn.Module]
    shape: tuple[int, ...]
    """Of the batch."""
    target: tuple[int, ...]
    """The shape of what the network is to give, or of labels if ``classes`` are given."""
    classes: int | None = None
    precision: str = "bf16"
    choices: Sequence[Options] = ({},)
    """The first of these that runs is ours."""
    graphs: bool = False
    """Whether a step with CUDA graphs is measured too."""

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def plain_key(self) -> object:
        """Cases that are the same one in plain PyTorch have the same."""
        return self.make.func, self.make.args, str(self.make.keywords), self.shape, self.precision

    @property
    def target_axes(self) -> tuple[str, ...] | None:
        """Those of a map of labels, which has no channels; None where they follow from its dims."""
        is_map = self.classes is not None and len(self.target) == 4
        return ("sample", "depth", "height", "width") if is_map else None

    def make_target(self, device: torch.device | str) -> Tensor:
        if self.classes is not None:
            return torch.randint(self.classes, self.target, device=device)
        return torch.randn(self.target, device=device)

    def loss(self, output: Any, target: Any) -> Any:
        if self.classes is not None:
            return F.cross_entropy(output, target)
        return F.mse_loss(output, target)

    def __str__(self) -> str:
        """The shape of the batch, such as ``8 x 4x128^3``."""
        samples, channels, *extents = self.shape
        if len(set(extents)) > 1:
            return f"{samples} x {'x'.join(map(str, self.shape[1:]))}"
        return f"{samples} x {channels}x{extents[0]}^{len(extents)}"


def cosmoflow(size: int, samples: int = 1, *, width: int = 16, **more: Any) -> Case:
    return Case(
        make=partial(CosmoFlow, size, base_channels=width),
        shape=(samples, 4, size, size, size),
        target=(samples, 4),
        **more,
    )


def mesh_tangling(extent: int, *, width: int = 128, **more: Any) -> Case:
    return Case(
        make=partial(mesh_2k, base_channels=width),
        shape=(1, 18, extent, extent),
        target=(1, 1, extent, extent),
        **more,
    )


def resnet(extent: int, samples: int, *, width: int = 64, **more: Any) -> Case:
    return Case(
        make=partial(ResNet50, base_channels=width),
        shape=(samples, 3, extent, extent),
        target=(samples,),
        classes=1000,
        **more,
    )


def unet(extent: int, *, width: int = 32, **more: Any) -> Case:
    return Case(
        make=partial(UNet3d, base_channels=width),
        shape=(1, 1, extent, extent, extent),
        target=(1, extent, extent, extent),
        classes=2,
        **more,
    )


def video(name: str, samples: int, frames: int, extent: int) -> Case:
    """A network of torchvision's for videos."""
    return Case(
        make=partial(make_video, name),
        shape=(samples, 3, frames, extent, extent),
        target=(samples,),
        classes=400,
    )


def make_video(name: str) -> nn.Module:
    from torchvision.models import video

    network: nn.Module = getattr(video, name)()
    return network


def make_cases() -> dict[str, Case]:
    """What matters most first: time may run out."""
    videos = ("r3d_18", "mc3_18") if find_spec("torchvision") else ()
    return {
        "host-32x8": cosmoflow(32, samples=8, graphs=True),
        "512-bf16": cosmoflow(512),
        "1024-bf16": cosmoflow(1024, choices=[{}, LEAN]),
        "128x8": cosmoflow(128, samples=8, graphs=True),
        "256": cosmoflow(256, graphs=True),
        "mesh-2k": mesh_tangling(2048),
        "resnet-50": resnet(224, samples=64, graphs=True),
        "512-tf32": cosmoflow(512, precision="tf32"),
        "unet-256": unet(256),
        "512-lean": cosmoflow(512, choices=[LEAN]),
        **{name: video(name, samples=8, frames=16, extent=112) for name in videos},
    }


def make_small_cases() -> dict[str, Case]:
    """The same networks, tiny, by the same names; in float32, as torch's bf16 is not for CPUs."""
    fp32 = {"precision": "fp32", "width": 2}
    return {
        "512-bf16": cosmoflow(16, **fp32),
        "512-tf32": cosmoflow(16, **fp32),
        "512-lean": cosmoflow(16, choices=[LEAN], **fp32),
        "1024-bf16": cosmoflow(32, choices=[{}, LEAN], **fp32),
        "128x8": cosmoflow(8, samples=2, **fp32),
        "256": cosmoflow(16, **fp32),
        "mesh-2k": mesh_tangling(128, **fp32),
        "resnet-50": resnet(32, samples=2, graphs=True, **fp32),
        "unet-256": unet(16, **fp32),
        "host-32x8": cosmoflow(8, **fp32),
    }
