"""Models that play against each other: rules, exchanges, deaths, seen from a user's own loop."""

import json
import math
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

import hyperslab as hs
from hyperslab.errors import CommError, ConfigError
from hyperslab.layout import Box
from hyperslab.testing import whole
from hyperslab.train.tournament.board import Board
from hyperslab.train.tournament.offer import HEADER_NBYTES, share
from hyperslab.train.tournament.rules import (
    changed_values,
    first_values,
    is_better,
    pairs_of,
    select,
)

# Rules


@given(st.sets(st.integers(0, 40), min_size=1), st.integers(0, 99), st.integers(1, 99))
def test_every_trainer_is_in_one_pair_but_one_of_an_odd_number(playing, seed, number):
    pairs = pairs_of([*playing], seed, number)
    paired = [trainer for pair in pairs for trainer in pair]
    assert len(paired) == len({*paired}) == len(playing) // 2 * 2
    assert {*paired} <= playing
    assert pairs == pairs_of(sorted(playing, reverse=True), seed, number)


def test_all_pairs_come_up():
    drawn = {pair for number in range(50) for pair in pairs_of([0, 1, 2, 3], 0, number)}
    assert len(drawn) == 6


@given(
    st.floats(1e-6, 10),
    st.floats(1, 100),
    st.floats(1, 50),
    st.integers(0, 9),
    st.integers(1, 200),
)
@settings(max_examples=50)
def test_values_never_leave_their_range(low, width, factor, seed, num):
    ranges = {"lr": (low, low * width), "momentum": (-0.5, 0.9), "fixed": (2.0, 2.0)}
    values = first_values(ranges, seed, trainer=num)
    for number in range(20):
        for name, (least, most) in ranges.items():
            assert least <= values[name] <= most
        values = changed_values({**values, "own": 7.0}, ranges, factor, seed, number, num)
        assert values.pop("own") == 7.0


def test_trainers_begin_with_different_values():
    assert len({first_values({"lr": (1e-4, 1e-2)}, 0, n)["lr"] for n in range(8)}) == 8


@pytest.mark.parametrize(
    ("score", "other", "expected"),
    [(1, 2, True), (2, 1, False), (1, 1, False), (math.nan, 1, False), (1, math.nan, True),
     (math.inf, 1, False), (-math.inf, 1, False), (math.nan, math.nan, False)],
)  # fmt: skip
def test_a_score_that_is_no_finite_number_loses(score, other, expected):
    assert is_better(score, other, higher_is_better=False) is expected
    if math.isfinite(score) and math.isfinite(other) and score != other:
        assert is_better(score, other, higher_is_better=True) is not expected


@given(st.lists(st.floats(-9, 9) | st.just(math.nan), min_size=2, max_size=12), st.booleans())
def test_the_last_of_a_population_take_models_of_the_first(scores, higher):
    by_trainer = dict(enumerate(scores))
    chosen = select(by_trainer, 0.25, 0, 1, higher_is_better=higher)
    finite = [score for score in scores if math.isfinite(score)]
    unfit = {trainer for trainer, score in by_trainer.items() if not math.isfinite(score)}
    if not finite:
        assert chosen == {}
        return
    assert unfit <= chosen.keys()
    assert not chosen.keys() & {*chosen.values()}
    for loser, winner in chosen.items():
        assert not is_better(scores[loser], scores[winner], higher_is_better=higher)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 4))
def test_every_box_is_laid_out_once(extents, num_ranks):
    """Of replicated tensors one rank lays out all, of cut ones each its own."""
    boxes = {f"model/{i}": Box.of((0, extent), (0, 3)) for i, extent in enumerate(extents)}
    cut = [{} for _ in range(num_ranks)]
    for rank in range(num_ranks):
        bounds = [extents[0] * r // num_ranks for r in (rank, rank + 1)]
        cut[rank]["model/0"] = (tuple(bounds), (0, 3))
    pieces = share(boxes, dict.fromkeys(boxes, 4), cut, frozenset({"model"}))
    for name, box in boxes.items():
        laid_out = [piece for mine in pieces for piece in mine if piece.name == name]
        assert sum(piece.box.numel for piece in laid_out) == box.numel
    for mine in pieces:
        ends = HEADER_NBYTES
        for piece in mine:
            assert piece.offset >= ends
            ends = piece.offset + piece.nbytes


def test_a_large_tensor_that_all_ranks_hold_is_copied_by_all():
    boxes = {"model/head": Box.of((0, 1000), (0, 4000)), "model/bias": Box.of((0, 1000))}
    pieces = share(boxes, dict.fromkeys(boxes, 4), [{}, {}, {}], frozenset({"model"}))
    nbytes = [sum(piece.nbytes for piece in mine) for mine in pieces]
    assert max(nbytes) - min(nbytes) <= 16_000


def test_the_first_note_of_a_name_stays(tmp_path):
    board = Board(tmp_path)
    assert board.read("roster-1") is None
    assert board.post_first("roster-1", [0, 1]) == [0, 1]
    assert board.post_first("roster-1", [0]) == [0, 1]
    board.post("roster-1", [2])
    board.post("roster-12", [2])
    assert (board.read("roster-1"), board.highest("roster")) == ([2], 12)


def test_a_trainer_is_alive_while_its_lock_is_held(tmp_path):
    mine, other = Board(tmp_path), Board(tmp_path)
    assert not other.is_held("trainer-0")
    mine.hold("trainer-0")
    assert other.is_held("trainer-0")
    with pytest.raises(ConfigError, match="trainer-0 is played by another process already"):
        other.hold("trainer-0")
    mine.close()
    assert not other.is_held("trainer-0")


# Matches


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(4 * 36, 2)
        self.phase = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        x = self.drop(self.norm(self.conv(x)).relu() * self.phase)
        return self.head(x.flatten(1))


class Loop:
    """A user's own loop: samples of its own, an Adam, a score on fixed samples."""

    def __init__(self, mesh, seed=0, dtype=torch.float64):
        torch.manual_seed(100 + seed)
        net = Net().to(dtype)
        self.mesh, self.model = mesh, hs.parallelize(net, mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(4, 1, 6, 6, generator=generator, dtype=dtype)
        self.x, self.y = hs.shard(x, mesh), hs.shard(x.mean((2, 3)).expand(4, 2), mesh)

    def step(self):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def score(self):
        self.model.eval()
        with torch.no_grad():
            found = float(F.mse_loss(self.model(self.x), self.y))
        self.model.train()
        return found

    def state(self):
        """Weights, and the first moments of Adam."""
        moments = {
            f"moment of {name}": whole(self.optimizer.state[weight]["exp_avg"]).clone()
            for name, weight in self.model.named_parameters()
        }
        return {**self.weights(), **moments}

    def weights(self):
        state = self.model.state_dict()
        return {name: whole(tensor).clone() for name, tensor in state.items()}


def everywhere(value):
    """The values of all ranks; the world of all ranks must be there."""
    told = [value] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told


def play(axes, num_steps, *, seed=0, score=None, **settings):
    """The matches of this trainer, its losses, and its weights at the end."""
    settings = {"every": 2, "carry": ("optimizer", "step", "rng"), **settings}
    with hs.Tournament(seed=seed, **settings) as game:
        loop = Loop(game.mesh(device="cpu", **(axes[game.trainer] if axes else {})), game.trainer)
        matches, losses = [], []
        for _ in range(num_steps):
            losses.append(loop.step())
            match = game.step(loop.model, loop.optimizer, (score or Loop.score).__get__(loop))
            matches += [match] if match else []
        return game.trainer, matches, losses, loop.weights()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("nodes", ["one", "two"])
def test_who_loses_goes_on_as_the_winner_does_bit_for_bit(nodes):
    """Weights, running statistics, Adam's moments and random generators are the winner's."""
    hs.init()
    with pytest.MonkeyPatch.context() as patch:
        if nodes == "two":
            node = f"node {dist.get_rank()}"
            patch.setattr("hyperslab.train.tournament.mailbox.node_name", lambda: node)
        trainer, matches, losses, weights = play(None, 6, trainers=2)
    told = everywhere((trainer, [match.adopted for match in matches], losses))
    (_, first, ours), (_, second, theirs) = told
    assert first[0] != second[0]  # one of both goes on with the other's
    assert ours[:2] != theirs[:2]
    assert ours[2:] == theirs[2:]
    assert all(torch.equal(weights[name], each) for name, each in everywhere(weights)[0].items())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("nodes", ["one", "four"])
def test_models_move_between_unlike_meshes_and_cut_weights(nodes):
    """One trainer cuts weights along channels, the other samples; what arrives is the same."""
    hs.init()
    node = nodes if nodes == "one" else f"node {dist.get_rank()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hyperslab.train.tournament.mailbox.node_name", lambda: node)
        found = [swapped(winner) for winner in (0, 1)]
    for winner, mine in enumerate(found):
        told = everywhere(mine)
        expected = told[2 * winner][0]
        for _, after in told:
            assert all(torch.equal(after[name], expected[name]) for name in expected)


def swapped(winner):
    """The weights and moments before and after a match that trainer ``winner`` wins."""
    with hs.Tournament(2, every=1, carry=("optimizer",)) as game:
        mesh = game.mesh(device="cpu", **[{"channel": 2}, {"sample": 2}][game.trainer])
        loop = Loop(mesh, game.trainer)
        loop.step()
        before = loop.state()
        scores = [0.0, 1.0] if game.trainer == winner else [1.0, 0.0]
        game.step(loop.model, loop.optimizer, lambda: scores.pop(0))
        return before, loop.state()


@pytest.mark.ranks(2)
def test_moments_that_were_taken_over_stay_when_the_next_model_comes():
    hs.init()
    scores = {0: [0.0, 1.0, 0.0, 1.0], 1: [1.0, 0.0, 0.0, 1.0]}
    with hs.Tournament(2, every=1, carry=("optimizer",)) as game:
        loop, mine = Loop(game.mesh(device="cpu"), game.trainer), scores[game.trainer]
        loop.step()
        assert game.step(loop.model, loop.optimizer, lambda: mine.pop(0)).adopted == game.trainer
        for _ in range(2 - game.trainer):
            loop.step()
        before = loop.state()
        assert not game.step(loop.model, loop.optimizer, lambda: mine.pop(0)).adopted
        assert all(torch.equal(before[name], each) for name, each in loop.state().items())
    ours, theirs = everywhere(before)
    assert not all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.ranks(2)
def test_the_process_group_of_all_ranks_is_there_again_afterwards():
    mesh = hs.init(sample=2, device="cpu")
    world = dist.group.WORLD
    x = torch.arange(6.0).view(2, 3)
    before = hs.gather(hs.shard(x, mesh))
    with hs.Tournament(2) as game:
        assert game.mesh(device="cpu").num_ranks == 1
        assert not dist.is_initialized()
    assert dist.group.WORLD is world
    assert torch.equal(hs.gather(hs.shard(x, mesh)), before)
    assert hs.init(sample=2, device="cpu").num_ranks == 2


@pytest.mark.ranks(4)
def test_the_same_seed_gives_the_same_matches_and_weights():
    hs.init()
    ranges = {"lr": (1e-3, 1e-1)}
    runs = [play(None, 6, trainers=4, ranges=ranges, perturb=1.5) for _ in range(2)]
    for (_, first, ours, mine), (_, second, theirs, other) in [runs]:
        assert list(map(str, first)) == list(map(str, second))
        assert [match.values for match in first] == [match.values for match in second]
        assert ours == theirs
        assert all(torch.equal(mine[name], other[name]) for name in mine)
    rates = everywhere([match.values["lr"] for match in runs[0][1]])
    assert len({each[0] for each in rates}) > 1
    assert all(1e-3 <= rate <= 1e-1 for each in rates for rate in each)


@pytest.mark.ranks(4)
def test_the_last_of_a_population_goes_on_from_the_first():
    hs.init()
    _, matches, _, _ = play(None, 2, trainers=4, method="population", ranges={"lr": (1e-3, 1e-1)})
    scores = everywhere(matches[0].own)
    adopted = everywhere((matches[0].adopted, matches[0].partner))
    last, first = scores.index(max(scores)), scores.index(min(scores))
    assert [each for each, _ in adopted] == [rank == last for rank in range(4)]
    assert adopted[last][1] == first
    assert adopted[first][1] == last


@pytest.mark.ranks(3)
def test_of_three_trainers_one_has_a_bye():
    hs.init()
    _, matches, _, _ = play(None, 6, trainers=3)
    for partners in zip(*everywhere([match.partner for match in matches]), strict=True):
        assert sorted(partner is None for partner in partners) == [False, False, True]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("carry", [(), ("optimizer",)])
def test_a_score_of_nan_loses_and_its_moments_go_with_it(carry):
    hs.init()
    told = []

    def score(loop):
        return float(sum(weight.sum() for weight in loop.model.parameters()))

    with hs.Tournament(2, every=1, carry=carry, say=told.append) as game:
        loop = Loop(game.mesh(device="cpu"), game.trainer)
        loop.step()
        if game.trainer == 1:
            with torch.no_grad():
                for weight in loop.model.parameters():
                    weight.fill_(math.nan)
            for state in loop.optimizer.state.values():
                state["exp_avg"].fill_(math.nan)
        match = game.step(loop.model, loop.optimizer, lambda: score(loop))
        loss = loop.step(), loop.step()
    assert match.adopted == (game.trainer == 1)
    assert match.adopted == ("its own score is nan" in str(match))
    assert all(map(math.isfinite, loss))


@pytest.mark.ranks(2)
def test_who_comes_too_late_is_played_without_and_may_come_back(tmp_path):
    hs.init()
    told, first_is_through, second_is_back = [], tmp_path / "first", tmp_path / "second"
    with hs.Tournament(
        2, every=1, folder=tmp_path / "game", say=told.append, timeout_seconds=0.5
    ) as game:
        loop = Loop(game.mesh(device="cpu"), game.trainer)
        if game.trainer == 1:
            wait_for(first_is_through)
        matches = [game.step(loop.model, loop.optimizer, loop.score)]
        (second_is_back if game.trainer else first_is_through).touch()
        wait_for(second_is_back)
        game.others.timeout *= 1000
        matches.append(game.step(loop.model, loop.optimizer, loop.score))
    if game.trainer == 0:
        assert matches[0].partner is None
        assert "trainer 1 did not come within 0.5 s" in told[0]
    else:
        assert matches[0].partner == 0  # whose model is still there
    assert matches[1].partner == 1 - game.trainer


def wait_for(path):
    while not path.exists():
        time.sleep(0.02)


@pytest.mark.ranks(2)
def test_bad_input_is_one_line_on_all_ranks():
    hs.init()
    with pytest.raises(ConfigError, match="2 ranks cannot be divided evenly among trainers = 3"):
        hs.Tournament(3)
    with pytest.raises(ConfigError, match=r"lr goes from 0.1 to 0.01, but its low end must not be"):
        hs.Tournament(2, ranges={"lr": (0.1, 0.01)})
    with pytest.raises(ConfigError, match="method must be one of pairs, population, got 'ladder'"):
        hs.Tournament(2, method="ladder")
    with pytest.raises(ConfigError, match=r"lr = 5 lies outside of its range, 0.01 to 0.1"):
        hs.Tournament(2, ranges={"lr": (0.01, 0.1)}, values={"lr": 5})
    with pytest.raises(ConfigError, match="lr has 3 numbers for 2 trainers"):
        hs.Tournament(2, values={"lr": [1, 2, 3]})
    with hs.Tournament(2, ranges={"learning_rate": (0.01, 0.1)}) as game:
        loop = Loop(game.mesh(device="cpu"))
        with pytest.raises(ConfigError, match="there is no hyperparameter 'learning_rate'"):
            game.step(loop.model, loop.optimizer, loop.score)
    assert everywhere("still together") == ["still together"] * 2


@pytest.mark.ranks(2)
def test_an_error_of_one_trainer_before_the_start_stops_all():
    hs.init()
    error = None
    try:
        with hs.Tournament(2) as game:
            if game.trainer == 1:
                raise ValueError("no data here")
            game.mesh(device="cpu")
    except (ValueError, CommError) as raised:
        error = str(raised)
    assert everywhere(error) == [
        "rank 1 stopped, and so do all: ValueError: no data here",
        "no data here",
    ]


@pytest.mark.ranks(2)
def test_a_trainer_whose_process_ends_is_missed_at_once(tmp_path):
    """Its lock goes with it: nobody waits for the time-out."""
    hs.init()
    told = []
    with hs.Tournament(2, every=1, folder=tmp_path, say=told.append, timeout_seconds=1000) as game:
        loop = Loop(game.mesh(device="cpu"), game.trainer)
        game.step(loop.model, loop.optimizer, loop.score)
        if game.trainer == 1:
            game.others.board.close()  # as the system does
        else:
            matches = [game.step(loop.model, loop.optimizer, loop.score) for _ in range(2)]
            assert [match.partner for match in matches] == [None, None]
            assert len(told) == 1
            assert "trainer 1" in told[0]


@pytest.mark.ranks(2)
def test_state_goes_on_where_it_was():
    hs.init()
    with hs.Tournament(2, every=3, ranges={"lr": (1e-3, 1e-1)}) as game:
        loop = Loop(game.mesh(device="cpu"), game.trainer)
        for _ in range(4):
            game.step(loop.model, loop.optimizer, loop.score)
        state = game.state_dict()
    with hs.Tournament(2, every=3, ranges={"lr": (1e-3, 1e-1)}) as game:
        game.mesh(device="cpu")
        game.load_state_dict(json.loads(json.dumps(state)))
        matches = [game.step(loop.model, loop.optimizer, loop.score) for _ in range(2)]
        assert game.state_dict()["steps"] == 6
        assert matches[0] is None
        assert matches[1].number == 2
        rates = {group["lr"] for group in loop.optimizer.param_groups}
        assert rates == {matches[1].values["lr"]}
