"""Published networks as plain modules, which know nothing of meshes."""

from hyperslab.models.autoencoder import (
    ConvAutoencoder as ConvAutoencoder,
    DenseAutoencoder as DenseAutoencoder,
)
from hyperslab.models.build import MODELS as MODELS, build as build, check_options as check_options
from hyperslab.models.cosmoflow import CosmoFlow as CosmoFlow
from hyperslab.models.flops import Description as Description, describe as describe
from hyperslab.models.hepcnn import HEPCNN as HEPCNN
from hyperslab.models.mesh_tangling import MeshTangling as MeshTangling
from hyperslab.models.resnet import ResNet50 as ResNet50
from hyperslab.models.stacked import (
    EncoderHead as EncoderHead,
    StackedAutoencoder as StackedAutoencoder,
    tie as tie,
)
from hyperslab.models.tiramisu import Tiramisu as Tiramisu
from hyperslab.models.unet3d import UNet3d as UNet3d
