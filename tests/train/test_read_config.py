import math
from dataclasses import MISSING, fields, replace
from pathlib import Path
from types import NoneType

import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from hyperslab.annotations import LARGEST, members
from hyperslab.errors import ConfigError
from hyperslab.train.config import Config
from hyperslab.train.config_schema import settings, tables
from hyperslab.train.preset_list import PRESETS
from hyperslab.train.read_config import config_name, read_config
from hyperslab.train.write_config import config_to_toml

LEAST = '[model]\nname = "cosmoflow"\n[data]\nfiles = "a/*.h5"\n'


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(text, *changes, name="mine.toml"):
    Path(name).write_text(text)
    return read_config(name, changes)


def error_of(text, *changes):
    with pytest.raises(ConfigError) as caught:
        read(text, *changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Values


def test_what_a_file_leaves_out_has_its_default():
    config = read(LEAST)
    assert (config.model.name, config.data.files) == ("cosmoflow", "a/*.h5")
    assert config == Config(model=config.model, data=config.data)


def test_whole_numbers_do_where_numbers_are_wanted_and_lists_become_tuples():
    config = read(LEAST + 'tile = [32, 32]\ntest = 0\n[optimizer]\nlr = 1\n[task]\nnames = ["a"]')
    assert (config.data.tile, config.task.names) == ((32, 32), ("a",))
    assert [type(each) for each in (config.optimizer.lr, config.data.test)] == [float, float]


def test_none_is_a_word_where_none_is_welcome():
    config = read(
        LEAST + 'shuffle = "none"\naugment = "none"\n[train]\nclip = 1.0', "train.clip=none"
    )
    assert (config.data.shuffle, config.data.augment, config.train.clip) == ("none", None, None)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('batch_size = "8"', 'data.batch_size must be a whole number, got "8"'),
        ("batch_size = 8.0", "data.batch_size must be a whole number, got 8.0"),
        ("batch_size = true", "data.batch_size must be a whole number, got true"),
        ("batch_size = 9223372036854775808", "must be a whole number of 64 bits, got 922337203685"),
        ("drop_last = 1", "data.drop_last must be true or false, got 1"),
        ("preset = 3", 'data.preset must be a string or "none", got 3'),
        ('files = ["a", 3]', 'must be a string or a list of strings, got ["a", 3]'),
        ("tile = [1.5]", 'must be a list of whole numbers, a whole number or "none", got [1.5]'),
        ("test = nan", "must be a finite number, a string or a list of strings, got nan"),
        ("test = 1.5", "data.test must be a fraction from 0 to below 1, or files, got 1.5"),
        ("beside = {label = 3}", "data.beside must be a table of strings, got {label = 3}"),
        ("batch_size = 1979-05-27", "data.batch_size must be a whole number, got 1979-05-27"),
        ("[optimizer]\nlr = inf", "optimizer.lr must be a finite number, got inf"),
        ("[task]\nnames = 'a'", 'task.names must be a list of strings, got "a"'),
    ],
)
def test_a_wrong_value_is_told_with_what_would_do(line, words):
    text = LEAST.replace('files = "a/*.h5"\n', "") if line.startswith("files") else LEAST
    assert words in error_of(text + line)


# Keys


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("batch_sise = 8", "no setting data.batch_sise (got 8): did you mean data.batch_size?"),
        ("[train]\nlr = 1e-3", "no setting train.lr (got 0.001): did you mean optimizer.lr?"),
        ("[train]\nbatch_size = 8", "did you mean data.batch_size?"),
        ("[task]\nname = 'x'", "did you mean task.names?"),
        ("[optimizer]\nbetas = [0.9, 0.99]", "did you mean optimizer.options.betas?"),
        ("[optimizer]\nlearning_rate = 1", "did you mean optimizer.lr?"),
        ("[run]\nqqqqq = 1", "[run] has folder, log_every, checkpoint_every, keep"),
        ("[optimiser]\nlr = 1", "no table [optimiser] (got {lr = 1}): did you mean [optimizer]?"),
        ("[zzz]\nlr = 1", "no table [zzz] (got {lr = 1}): the tables are model, data, mesh"),
        ("base = 'hepcnn'", 'no setting data.base (got "hepcnn"): did you mean base at the top'),
    ],
)
def test_a_wrong_key_is_told_with_the_nearest(line, words):
    told = error_of(LEAST + line)
    assert told.startswith("mine.toml: there is ")
    assert words in told


def test_settings_above_the_first_table_are_told_theirs():
    assert "no setting epochs (got 3): did you mean train.epochs?" in error_of(
        "epochs = 3\n" + LEAST
    )
    assert "model must be a table of settings" in error_of("model = 'cosmoflow'")


@pytest.mark.parametrize(("text", "key"), [("", "model.name"), ('model.name = "x"', "data.files")])
def test_missing_keys_are_named(text, key):
    assert f"mine.toml does not set {key}" in error_of(text)


# Files


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LEAST + "x = ", "mine.toml, line 5, column 5: "),
        ("[model\nname = 3", "mine.toml, line 1, column 7: Expected ']'"),
        ("a = 1\na = 2", "mine.toml, line 2, column 6: Cannot overwrite"),
        ("x = " + "[" * 3000 + "]" * 3000, "nested too deeply"),
    ],
)
def test_an_error_of_syntax_has_its_place(text, words):
    assert words in error_of(text)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("mien.toml", "did you mean mine.toml? hyperslab train --list shows all presets"),
        ("cosmoflow-12", "cosmoflow-12 is neither a file nor a preset"),
        ("cosmoflow-12", "did you mean cosmoflow-128?"),
        ("hepcn", "did you mean hepcnn?"),
        (".", ". is a folder without config.toml"),
        ("mine.toml/x", "Not a directory"),
        ("binary.toml", "binary.toml is not a TOML file"),
        ("a\0b", "is not a path"),
    ],
)
def test_a_source_that_is_not_there(source, words):
    Path("mine.toml").write_text(LEAST)
    Path("binary.toml").write_bytes(b"\x89HDF\xff")
    with pytest.raises(ConfigError) as caught:
        read_config(source)
    assert words in str(caught.value)


def test_a_byte_order_mark_does_no_harm():
    Path("mine.toml").write_bytes(b"\xef\xbb\xbf" + LEAST.replace("\n", "\r\n").encode())
    assert read_config("mine.toml").model.name == "cosmoflow"


def test_a_run_folder_is_read_and_stays_its_own():
    Path("moved").mkdir()
    config = read(LEAST + "[run]\nfolder = 'runs/old'\nkeep = 7")
    Path("moved/config.toml").write_text(config_to_toml(config))
    again = read_config("moved")
    assert again == replace(config, run=replace(config.run, folder="moved"))
    assert read_config("moved", ["run.folder=new"]).run.folder == "new"


def test_a_preset_comes_before_a_folder_of_its_name():
    Path("climate").mkdir()
    assert read_config("climate").model.name == "tiramisu"


@pytest.mark.parametrize(
    ("source", "name"), [("hepcnn", "hepcnn"), ("a/mine.toml", "mine"), (".", None)]
)
def test_runs_are_named_after_their_source(source, name, folder):
    assert config_name(source) == (name or folder.name)


# Bases


def test_a_file_begins_with_a_preset_and_says_what_is_different():
    config = read("base = 'cosmoflow-128'\n[model.options]\ndropout = 0.0\n[train]\nepochs = 3")
    assert config.model.options == {"size": 128, "batch_norm": True, "dropout": 0.0}
    plain = read_config("cosmoflow-128")
    assert config == replace(plain, model=config.model, train=replace(plain.train, epochs=3))


def test_options_go_with_the_name_they_belong_to():
    assert read("base = 'cosmoflow-128'\n[optimizer]\nname = 'sgd'").optimizer.options == {}
    assert read("base = 'cosmoflow-128'\n[optimizer]\nname = 'adam'").optimizer.options != {}
    changes = ["model.options.channels=8", "model.name=hepcnn"]
    assert read_config("cosmoflow-128", changes).model.options == {"channels": 8}


def test_a_base_is_looked_for_beside_its_file():
    Path("sub").mkdir()
    read(LEAST + "batch_size = 3", name="sub/first.toml")
    read("base = 'first.toml'\n[train]\nepochs = 7", name="sub/second.toml")
    config = read("base = 'sub/second.toml'")
    assert (config.data.batch_size, config.train.epochs) == (3, 7)


def test_files_that_are_each_others_base_are_refused():
    assert "mine.toml is its own base" in error_of("base = 'mine.toml'")
    Path("other.toml").write_text("base = 'mine.toml'")
    assert "by way of" in error_of("base = 'other.toml'")
    assert "base must be the name of a preset or a file, got 3" in error_of("base = 3")
    assert "nowhere.toml is neither" in error_of("base = 'nowhere.toml'")


# Changes


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("data.batch_size=8", 8),
        ('data.files="b/*.h5"', "b/*.h5"),
        ("data.files=b/*.h5", "b/*.h5"),
        ("data.files=[ab]*.h5", "[ab]*.h5"),
        ('data.files=["b", "c"]', ("b", "c")),
        ("data.sample=2024", "2024"),
        ("data.sample=2024-01-01", "2024-01-01"),
        ("data.test=0.2", 0.2),
        ("data.test=test/*.h5", "test/*.h5"),
        ("data.memory_budget=20GiB", "20GiB"),
        (" data.normalize = log1p ", "log1p"),
        ("optimizer.lr=1e-4", 1e-4),
        ("run.figures=false", False),
        ("train.clip=none", None),
        ("model.options={}", {}),
        ("data.axes.full=DHWC", {"full": "DHWC"}),
    ],
)
def test_changes_are_toml_or_bare_words(change, value):
    table, name = change.partition("=")[0].split(".")[:2]
    assert getattr(getattr(read(LEAST, change), table.strip()), name.strip()) == value


def test_changes_inside_tables_keep_the_rest_and_the_last_wins():
    changes = ["model.options.a=1", "model.options.b.c=[0.9, 0.99]", "model.options.a=2"]
    assert read(LEAST, *changes).model.options == {"a": 2, "b": {"c": [0.9, 0.99]}}
    config = read(LEAST + "normalize = 'log1p'", "data.normalize.scale=2")
    assert config.data.normalize == {"scale": 2}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("data.batch_sise=8", "did you mean data.batch_size?"),
        ("lr=3", "no setting lr (got 3): did you mean optimizer.lr?"),
        ("trian.epochs=3", "no table [trian] (got {epochs = 3}): did you mean [train]?"),
        ("data=3", "data must be a table"),
        ("data={}", "data is a table: change its settings one by one"),
        ("data.batch_size", "a change is a key and a value, such as data.batch_size=8"),
        ("data.batch_size=", "a change is a key and a value"),
        ("=8", "a change is a key and a value"),
        ("data..x=8", "a change is a key and a value"),
        ("data.batch_size=x", 'data.batch_size must be a whole number, got "x"'),
        ("data.batch_size=1\n[x]", "data.batch_size must be a whole number"),
        ("data.batch_size.x=3", "data.batch_size is no table, and has no x"),
        ("data.files=[a, b]", 'strings in lists and tables need quotes, such as ["a", "b"]'),
        ('model.options.x="abc', "is not a TOML value"),
        ("train.epochs=none", 'train.epochs must be a whole number, got "none"'),
        ("base=hepcnn", "did you mean base at the top of a file?"),
    ],
)
def test_a_bad_change_is_named(change, words):
    Path("mine.toml").write_text(LEAST)
    with pytest.raises(ConfigError) as caught:
        read_config("mine.toml", ["train.epochs=3", change])
    assert str(caught.value).startswith(f"--set {change}: ")
    assert words in str(caught.value)


# Writing

WORDS = st.text().filter(lambda text: text != "none")
ANYTHING = st.recursive(
    st.booleans()
    | st.integers(-LARGEST, LARGEST - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
VALUES = {
    "str": WORDS,
    "int": st.integers(1, LARGEST - 1),
    "float": st.floats(0.01, 0.4),
    "bool": st.booleans(),
    "Sequence[str]": st.lists(WORDS, max_size=3, unique=True).map(tuple),
    "Sequence[int]": st.lists(st.integers(1, 99), max_size=3).map(tuple),
    "Sequence[float]": st.lists(st.floats(0, 1), max_size=3).map(tuple),
    "Mapping[str, str]": st.dictionaries(st.text(), st.text(), max_size=3),
    "Mapping[str, Any]": st.dictionaries(st.text(), ANYTHING, max_size=3),
    "None": st.none(),
}
CHOICES = {
    "task.kind": ["regression", "segmentation"],
    "schedule.decay": ["none", "cosine"],
    "schedule.warmup_epochs": [0.0, 0.005],
    "train.precision": ["fp32", "bf16"],
    "train.batch_stats": ["global", "spatial"],
    "train.accumulate": [1],
    "train.cuda_graphs": [True, "auto"],
    "train.shard_weights": [False],
    "mesh.auto": [False],
    "run.trace": ["coarse", "off"],
    "stages.epochs": [None],
    "stages.lr": [None, 0.1, (0.1, 0.25)],
    "stages.noise": [0.5, (0.0, 0.25)],
    "finetune.run": [None],
    "finetune.pool": ["mean", "moments"],
    "data.validation_beside": [{}],
    "data.test_beside": [{}],
    "tournament.trainers": [1, 2],
    "tournament.data": ["share", "all"],
    "tournament.meshes": [()],
}


def values(table, name, annotation):
    if f"{table}.{name}" in CHOICES:
        return st.sampled_from(CHOICES[f"{table}.{name}"])
    shown = [kind.__name__ if isinstance(kind, type) else str(kind) for kind in members(annotation)]
    shown = [word.rpartition("abc.")[2].replace("typing.", "") for word in shown]
    return st.one_of(*(VALUES["None" if word == "NoneType" else word] for word in shown))


def some_settings(table):
    """Any of its settings, and those it needs."""
    drawn = {name: values(table, name, each) for name, each in settings(table).items()}
    needed = {
        each.name
        for each in fields(tables()[table])
        if each.default is MISSING and each.default_factory is MISSING
    }
    return st.fixed_dictionaries(
        {name: each for name, each in drawn.items() if name in needed},
        optional={name: each for name, each in drawn.items() if name not in needed},
    ).map(lambda given: tables()[table](**given))


CUTS = st.dictionaries(st.sampled_from(["depth", "split"]), st.integers(1, 4) | st.text())
CONFIGS = st.fixed_dictionaries(
    {table: some_settings(table) for table in tables()},
    optional={"plan": st.dictionaries(st.text(), CUTS, max_size=2)},
)


@hypothesis_settings(max_examples=25, deadline=None)
@given(CONFIGS)
def test_what_is_written_reads_back_to_the_same(parts):
    config = Config(**parts)
    path = Path("written.toml")
    path.write_text(config_to_toml(config), encoding="utf-8")
    assert read_config(path) == config


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_written_with_what_each_setting_means(name):
    config = read_config(name)
    text = config_to_toml(config)
    assert "# Samples in one step, over all ranks.\nbatch_size = " in text
    Path("shown.toml").write_text(text)
    assert read_config("shown.toml") == config


def test_values_that_are_not_finite_may_be_options():
    options = read(LEAST, "model.options.low=-inf", "model.options.bad=nan").model.options
    assert options["low"] == -math.inf
    assert math.isnan(options["bad"])
    assert NoneType not in map(type, options.values())


def test_a_value_that_is_a_table_takes_the_place_of_that_of_the_preset(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "resnet50"\n[data]\nnormalize = {log1p = true}\n')
    assert read_config(str(path), []).data.normalize == {"log1p": True}


# The plan, whose names are those of modules


@pytest.mark.parametrize(
    ("change", "plan"),
    [
        ("plan.*.split=blocks", {"*": {"split": "blocks"}}),
        ("plan.encoder.0.channel=2", {"encoder.0": {"channel": 2}}),
        ('plan."encoder.*".channel=2', {"encoder.*": {"channel": 2}}),
        ("plan.head={channel = 2, depth = 2}", {"head": {"channel": 2, "depth": 2}}),
    ],
)
def test_a_plan_is_changed_by_names_of_modules(change, plan):
    assert read_config("autoencoder-wide", [change]).plan == plan


def test_a_plan_is_a_table_of_a_file_and_is_written_back():
    text = 'base = "autoencoder-wide"\n[plan."encoder.*"]\nchannel = 2\nsplit = "filter"\n'
    Path("mine.toml").write_text(text)
    config = read_config("mine.toml", ["plan.decoder.channel=2"])
    assert config.plan == {
        "encoder.*": {"channel": 2, "split": "filter"},
        "decoder": {"channel": 2},
    }
    Path("written.toml").write_text(config_to_toml(config))
    assert read_config("written.toml") == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("plan = 3", r"plan must be a table of modules and their cuts, such as plan\."),
        ("[plan]\nhead = 3", "plan.head must be a table of whole numbers or strings, got 3"),
        ("[plan.encoder.0]\nchannel = 2", r"plan.encoder must be .* \(names with dots need quotes"),
        ('[plan."a.b"]\nchannel = 0.5', r'plan."a.b" must be a table of whole numbers or strings'),
    ],
)
def test_a_plan_of_something_else_is_told(text, words):
    Path("mine.toml").write_text(f'base = "autoencoder-wide"\n{text}\n')
    with pytest.raises(ConfigError, match=words):
        read_config("mine.toml")
