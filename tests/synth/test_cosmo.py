import h5py
import numpy as np
import pytest

from hyperslab.errors import ConfigError
from hyperslab.synth import Universes, cosmo, produce
from hyperslab.synth.cosmo import (
    REDSHIFTS,
    Lattice,
    add_particles,
    count_particles,
    displacements,
    forward,
    inverse,
    linear_field,
    potential,
)
from hyperslab.synth.cosmology import RANGES, Cosmology

COSMOLOGY = Cosmology()
LATTICE = Lattice(size=64, cell=2.0)
SEEDS = range(3)


def spectrum(contrast, lattice, *, counted):
    """Power in shells of one fundamental wavenumber each, the first at 0.

    ``counted`` takes out what the cells smooth away; particles on a lattice have no shot noise on
    scales much larger than it, and nothing is subtracted.
    """
    num = len(contrast)
    k = 2 * np.pi * np.fft.fftfreq(num, lattice.cell)
    half = 2 * np.pi * np.fft.rfftfreq(num, lattice.cell)
    power = np.abs(np.fft.rfftn(contrast)) ** 2
    if counted:
        x, y, z = (np.sinc(wave * lattice.cell / (2 * np.pi)) ** 2 for wave in (k, k, half))
        power /= x[:, None, None] * y[:, None] * z
    length = np.sqrt(k[:, None, None] ** 2 + k[:, None] ** 2 + half**2)
    shell = np.rint(length * lattice.length / (2 * np.pi)).astype(int).ravel()
    times = np.broadcast_to(np.where((half == 0) | (half == half.max()), 1, 2), power.shape)
    sums = np.bincount(shell, (power * times).ravel()) / np.bincount(shell, times.ravel())
    return sums * lattice.length**3 / num**6


def linear(seed, cosmology=COSMOLOGY, lattice=LATTICE):
    field = linear_field(cosmology, lattice, np.random.default_rng(seed))
    return inverse(field, lattice.num)


def counted(seed, cosmology=COSMOLOGY, lattice=LATTICE, redshifts=REDSHIFTS):
    return count_particles(cosmology, lattice, np.random.default_rng(seed), redshifts)


@pytest.fixture(scope="module")
def universes():
    """(linear density today, counts) of a few universes with the same parameters."""
    return [(linear(seed), counted(seed)) for seed in SEEDS]


def test_single_precision_transforms_are_those_of_numpy():
    field = np.random.default_rng(0).standard_normal((5, 5, 5)).astype(np.float32)
    np.testing.assert_allclose(forward(field), np.fft.rfftn(field), atol=1e-5)
    np.testing.assert_allclose(inverse(forward(field), 5), field, atol=1e-6)


def test_the_linear_field_has_the_spectrum_of_its_cosmology():
    measured = np.mean([spectrum(linear(seed), LATTICE, counted=False) for seed in SEEDS], 0)
    shells = np.arange(8, 24)  # each with over 800 waves, so that chance is a few percent
    expected = Cosmology().power(2 * np.pi / LATTICE.length * shells)
    np.testing.assert_allclose(measured[shells], expected, rtol=0.1)


@pytest.mark.parametrize(
    ("redshift", "cell", "most"),
    [(0.0, 4.0, 0.06), (0.5, 4.0, 0.08), (1.5, 2.0, 0.2), (3.0, 2.0, 0.3)],
)
def test_counts_follow_linear_theory_on_large_scales(redshift, cell, most):
    # Compared with the linear field that the same universes came from, so that it is gravity that
    # is tested and not chance. Up to wavenumber ``most``, in h/Mpc: what is larger has not yet
    # collapsed at that time.
    lattice = Lattice(size=64, cell=cell)
    shells = slice(1, int(most * lattice.length / (2 * np.pi)) + 1)
    of_counts, of_linear = 0, 0
    for seed in SEEDS:
        counts = counted(seed, lattice=lattice, redshifts=[redshift])[..., 0]
        of_counts += spectrum(counts - 1.0, lattice, counted=True)[shells]
        of_linear += spectrum(linear(seed, lattice=lattice), lattice, counted=False)[shells]
    assert len(of_counts) >= 2
    ratio = of_counts / (Cosmology().growth(redshift) ** 2 * of_linear)
    np.testing.assert_allclose(ratio, 1, atol=0.1)


def test_counts_lie_where_the_linear_field_is_dense(universes):
    for field, counts in universes:
        early, coarse = (
            array.reshape(8, 8, 8, 8, 8, 8).mean((1, 3, 5)).ravel()
            for array in (counts[..., 3], field)
        )
        assert np.corrcoef(early, coarse)[0, 1] > 0.95


def test_structure_grows_with_time_as_linear_theory_says(universes):
    early, late = 3, 2
    grown = Cosmology().growth(REDSHIFTS[late]) / Cosmology().growth(REDSHIFTS[early])
    power = [
        sum(spectrum(c[..., channel] - 1.0, LATTICE, counted=True)[1:4].sum() for _, c in universes)
        for channel in (early, late)
    ]
    assert power[1] / power[0] == pytest.approx(grown**2, rel=0.05)
    for _, counts in universes:
        assert (np.diff(counts.reshape(-1, 4).std(0)) < 0).all()


@pytest.mark.parametrize("redshift", REDSHIFTS)
def test_sigma_8_makes_cells_differ_more(redshift):
    lattice = Lattice(size=48)
    spreads = [
        counted(0, Cosmology(sigma_8=sigma_8), lattice, [redshift]).std()
        for sigma_8 in (0.78, 0.865, 0.95)
    ]
    assert (np.diff(spreads) > 0).all()


def test_power_on_large_scales_goes_with_the_square_of_sigma_8():
    low, high = (
        spectrum(
            counted(0, Cosmology(sigma_8=s), redshifts=[3.0])[..., 0] - 1.0, LATTICE, counted=True
        )
        for s in (0.78, 0.95)
    )
    assert high[1:4].sum() / low[1:4].sum() == pytest.approx((0.95 / 0.78) ** 2, rel=0.05)


def test_omega_m_changes_the_shape_and_the_growth():
    few, many = (counted(0, Cosmology(omega_m=m), redshifts=[0.5, 3.0]) - 1.0 for m in (0.25, 0.35))
    shapes, growths = [], []
    for counts in (few, many):
        late, early = (spectrum(counts[..., channel], LATTICE, counted=True) for channel in (0, 1))
        shapes.append(early[12:16].sum() / early[1:4].sum())
        growths.append(late[1:4].sum() / early[1:4].sum())
    k = 2 * np.pi / LATTICE.length * np.array([2, 14])
    slopes = [np.divide(*Cosmology(omega_m=m).power(k)[::-1]) for m in (0.25, 0.35)]
    assert shapes[1] / shapes[0] == pytest.approx(slopes[1] / slopes[0], rel=0.15)
    expected = [
        (Cosmology(omega_m=m).growth(0.5) / Cosmology(omega_m=m).growth(3)) ** 2
        for m in (0.25, 0.35)
    ]
    assert growths[1] / growths[0] == pytest.approx(expected[1] / expected[0], rel=0.05)


@pytest.mark.parametrize(("size", "per_cell"), [(4, 1), (5, 1), (7, 3), (16, 2), (33, 1)])
def test_no_particle_is_lost(size, per_cell):
    lattice = Lattice(size=size, per_cell=per_cell)
    counts = counted(1, lattice=lattice)
    assert counts.dtype == np.int16
    assert (counts.sum((0, 1, 2), dtype=np.int64) == (size * per_cell) ** 3).all()


def test_particles_that_are_not_moved_stay_one_a_cell():
    lattice = Lattice(size=6, per_cell=2)
    counts = np.zeros((6, 6, 6), np.int16)
    add_particles([np.zeros((12, 12, 12), np.float32)] * 3, lattice, counts)
    assert (counts == 8).all()


def test_particles_that_leave_the_box_come_back_on_the_other_side(monkeypatch):
    monkeypatch.setattr(cosmo, "PARTICLES_AT_ONCE", 8)
    rng = np.random.default_rng(0)
    moves = rng.normal(0, 20, (3, 6, 6, 6)).astype(np.float32)
    counts = np.zeros((6, 6, 6), np.int16)
    add_particles(moves, Lattice(size=6), counts)
    places = np.floor(moves + np.indices((6, 6, 6)) + np.float32(0.5)).astype(int) % 6
    expected = np.zeros_like(counts)
    np.add.at(expected, tuple(places), 1)
    np.testing.assert_array_equal(counts, expected)


def test_displacements_are_the_slopes_whose_divergence_is_the_density():
    lattice = Lattice(size=16)
    k = 2 * np.pi / 16 * np.arange(16)
    density = (0.01 * np.cos(k)).astype(np.float32)[:, None, None] + np.zeros((16, 16, 16), "f4")
    x, y, z = displacements(potential(forward(density), lattice), lattice, growth=1.0)
    smoothed = np.exp(-((2 * np.pi / 16 * cosmo.SMOOTHING) ** 2) / 2)
    expected = -0.01 * smoothed / (2 * np.pi / 16) * np.sin(k)
    np.testing.assert_allclose(x[:, 3, 5], expected, atol=1e-6)
    np.testing.assert_allclose([y, z], 0, atol=1e-6)


def test_more_particles_than_int16_holds_in_a_cell_are_refused():
    counts = np.full((4, 4, 4), 32767, np.int16)
    with pytest.raises(ConfigError, match="a cell has 32768 particles"):
        add_particles([np.zeros((4, 4, 4), np.float32)] * 3, Lattice(size=4), counts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("cosmo")
    produce(Universes(size=32, count=24), out)
    return out


def test_files_have_the_schema_of_cosmoflow(folder):
    with h5py.File(folder / "cosmo_000003.h5") as file:
        assert {name: (array.shape, array.dtype.str) for name, array in file.items()} == {
            "full": ((32, 32, 32, 4), "<i2"),
            "unitPar": ((4,), "<f4"),
            "physPar": ((4,), "<f4"),
            "namePar": ((4,), "|S7"),
            "redshifts": ((4,), "<f4"),
        }
        assert file["full"].chunks is None
        assert list(file["redshifts"]) == [0, 0.5, 1.5, 3]
        assert list(file["namePar"].asstr()) == ["Omega_m", "sigma_8", "N_spec", "H_0"]


def test_parameters_lie_where_their_units_say(folder):
    for path in folder.iterdir():
        with h5py.File(path) as file:
            unit, physical = file["unitPar"][:], file["physPar"][:]
        assert (np.abs(unit) <= 1).all()
        low, high = np.transpose(list(RANGES.values()))
        np.testing.assert_allclose(physical, low + (unit + 1) / 2 * (high - low), rtol=1e-6)


def test_sigma_8_can_be_read_off_the_counts(folder):
    spreads, sigmas = [], []
    for path in folder.iterdir():
        with h5py.File(path) as file:
            spreads.append(file["full"][..., 3].std())
            sigmas.append(file["physPar"][1])
    assert np.corrcoef(spreads, sigmas)[0, 1] > 0.6  # boxes of 32 Mpc/h differ much by chance


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"size": 3}, "must be 4 to 1024, got 3"),
        ({"size": 1025}, "must be 4 to 1024, got 1025"),
        ({"particles": 2}, "must be a cube, such as 1, 8 or 27, got 2"),
        ({"count": 0}, "count must be above 0"),
    ],
)
def test_settings_that_will_not_do_are_refused(setting, words):
    with pytest.raises(ConfigError, match=words):
        Universes(**setting)


def test_memory_is_foretold_for_the_largest_sizes():
    assert 3.0 < Universes(size=512).memory_nbytes / 2**30 < 4.5
