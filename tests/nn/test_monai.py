"""What users of MONAI bring: its losses on Slabs, MetaTensors, sliding windows."""

import pytest
import torch
import torch.nn.functional as F

import hyperslab as hs
from hyperslab.testing import assert_same_as_serial, seeded
from hyperslab.testing.strategies import Place

losses = pytest.importorskip("monai.losses")
monai_data = pytest.importorskip("monai.data")
inferers = pytest.importorskip("monai.inferers")

SHAPE = (3, 4, 7, 6, 5)
DEPTH = Place({"depth": 2}, {"depth": [0, 5, 7]})
HEIGHT = Place({"sample": 2, "height": 2}, {"height": [0, 1, 6]})
LABELS = (seeded(3, 1, *SHAPE[2:]).abs() * 2).long().clamp(max=3)
FROM_LABELS = {"to_onehot_y": True, "softmax": True}

LOSSES = {
    "Dice": lambda: losses.DiceLoss(**FROM_LABELS),
    "Dice with cross-entropy": lambda: losses.DiceCELoss(**FROM_LABELS),
    "Dice without background": lambda: losses.DiceLoss(**FROM_LABELS, include_background=False),
    "generalized Dice": lambda: losses.GeneralizedDiceLoss(**FROM_LABELS),
    "Tversky": lambda: losses.TverskyLoss(**FROM_LABELS, reduction="sum"),
    "centre lines": lambda: losses.SoftDiceclDiceLoss(**FROM_LABELS),
}


def check_loss(place, name):
    loss, mesh = LOSSES[name](), place.mesh()
    labels = hs.shard(LABELS, mesh, cuts=place.cuts_of(5))

    def function(scores):
        return loss(scores, labels if isinstance(scores, hs.Slab) else LABELS)

    assert_same_as_serial(function, [seeded(*SHAPE)], mesh=mesh, cuts=place.cuts_of(5))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.every(5)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("place", [DEPTH, HEIGHT], ids=str)
def test_a_loss_of_labels_equals_that_of_one_process(run, place, name):
    run(place, check_loss, name)


def check_deformation(place):
    field = seeded(3, 3, *SHAPE[2:])
    for loss in (losses.BendingEnergyLoss(), losses.DiffusionLoss()):
        assert_same_as_serial(loss, [field], mesh=place.mesh(), cuts=place.cuts_of(5))


@pytest.mark.filterwarnings("ignore")
def test_a_deformation_is_as_smooth_as_in_one_process(run):
    run(DEPTH, check_deformation)


def check_meta_tensor(place):
    """A batch of MetaTensors, whose description cannot be sliced."""
    mesh, cuts = place.mesh(), place.cuts_of(5)
    samples = [monai_data.MetaTensor(seeded(*SHAPE[1:], seed=n)) for n in range(3)]
    batch = monai_data.list_data_collate(samples).requires_grad_()
    plain = torch.stack([seeded(*SHAPE[1:], seed=n) for n in range(3)])
    slab = hs.shard(batch, mesh, cuts=cuts)
    assert type(slab.local) is torch.Tensor
    assert type(hs.gather(slab[:, 1:] * 2)) is torch.Tensor
    assert hs.gather(slab).equal(plain)
    (slab * slab * seeded(*SHAPE)).sum().backward()
    torch.testing.assert_close(batch.grad.as_subclass(torch.Tensor), 2 * plain * seeded(*SHAPE))
    piece = monai_data.MetaTensor(slab.local.detach())
    assert type(hs.from_local(piece, mesh, SHAPE, cuts=cuts).local) is torch.Tensor


@pytest.mark.filterwarnings("ignore")
def test_a_meta_tensor_is_sharded_as_a_tensor(run):
    run(DEPTH, check_meta_tensor)


def check_sliding_windows(place):
    mesh, volume = place.mesh(), seeded(1, 2, 9, 8, 7)
    weight = seeded(3, 2, 3, 3, 3)

    def model(x):
        return F.conv3d(x, weight, padding=1)

    settings = {"roi_size": (4, 5, 4), "sw_batch_size": 2, "overlap": 0.5, "mode": "gaussian"}
    due = inferers.sliding_window_inference(volume, predictor=model, **settings)
    x = hs.shard(volume, mesh)
    found = inferers.sliding_window_inference(
        hs.gather(x), predictor=lambda part: hs.gather(model(hs.shard(part, mesh))), **settings
    )
    torch.testing.assert_close(found, due, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="Slab"):  # by MONAI, which knows tensors and arrays
        inferers.sliding_window_inference(
            x, predictor=lambda part: hs.gather(model(part)), **settings
        )


@pytest.mark.filterwarnings("ignore")
def test_windows_are_split_as_they_slide(run):
    run(Place({"depth": 2}), check_sliding_windows)
