"""Targets that are rows of a table, attributes of files, or rows of one array."""

import h5py
import numpy as np
import pytest

import hyperslab as hs


@pytest.fixture
def folder(tmp_path):
    """Four cubes with attributes, and what belongs to them in tables."""
    (tmp_path / "cubes").mkdir()
    for number in (2, 10, 1, 7):
        with h5py.File(tmp_path / "cubes" / f"cube_{number}.h5", "w") as file:
            file["x"] = np.full((2, 3, 4), number, np.float32)
            file.attrs["mass"] = number + 0.5
            file.attrs["steps"] = number
            file["x"].attrs["origin"] = [number, -number]
    return tmp_path


def opened(folder):
    return hs.open(folder / "cubes" / "cube_*.h5", axes="DHW")


def rows(data, name="y"):
    """Which cube each sample is, and what it is to give."""
    return [
        (int(data.read(i)[0, 0, 0]), data.read(i, array=name).tolist()) for i in range(len(data))
    ]


def with_table(folder, text, by=None, **options):
    (folder / "t.csv").write_text(text)
    return opened(folder).beside(by=by, y=hs.table(folder / "t.csv", **options))


EXPECTED = [(1, [1.0, -1.5]), (10, [10.0, -10.5]), (2, [2.0, -2.5]), (7, [7.0, -7.5])]
NAMES = {
    "names": "cube_{}.h5",
    "names without suffix": "cube_{}",
    "names with folders": "cubes/cube_{}.h5",
    "what the wildcard stands for": "{}",
}


@pytest.mark.parametrize("way", NAMES)
def test_rows_belong_to_files_by(way, folder):
    lines = [f"{NAMES[way].format(n)}, {n} ,{-n - 0.5}" for n in (7, 10, 2, 1)]
    assert rows(with_table(folder, "\n".join(["file,a,b", *lines]))) == EXPECTED


def test_columns_and_key_are_chosen(folder):
    lines = [f"{n / 2};{n};run {n};cube_{n}" for n in (1, 2, 7, 10)]
    text = "\ufeffhalf;whole;note;name\r\n" + "\r\n".join(lines) + "\r\n\r\n"
    data = with_table(folder, text, key="name", columns=["whole", "half"])
    assert rows(data) == [(n, [n, n / 2]) for n in (1, 10, 2, 7)]
    assert data.arrays["y"].dtype == np.float64
    number = with_table(folder, text, key="name", columns="whole")
    assert rows(number) == [(n, n) for n in (1, 10, 2, 7)]
    assert (number.arrays["y"].dtype, number.arrays["y"].shape) == (np.int64, ())
    by_number = with_table(folder, text, key="note", columns="half", by=r"(\d+)")
    assert rows(by_number) == [(n, n / 2) for n in (1, 10, 2, 7)]


def test_rows_may_be_taken_in_order(folder):
    text = "a,b\n1,-1.5\n10,-10.5\n2,-2.5\n7,-7.5\n"
    assert rows(with_table(folder, text, by="row")) == EXPECTED
    with pytest.raises(hs.ConfigError, match=r"3 rows of .*t\.csv cannot be put beside 4 samples"):
        with_table(folder, text.rpartition("7,")[0], by="row")


def test_rows_go_with_tiles_and_parts(folder):
    text = "file,a,b\n" + "".join(f"{n},{n},{-n - 0.5}\n" for n in (10, 7, 2, 1))
    data = with_table(folder, text).tiled((1, 3, 2)).take([4, 15, 0])
    assert rows(data) == [EXPECTED[1], EXPECTED[3], EXPECTED[0]]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            ["1,1", "2,2", "7,7"],
            r"each of 4 files once in its 3 rows: 1 without a row: cube_10\.h5",
        ),
        (["1,1", "2,2", "7,7", "10,1", "2,2"], "in its 5 rows: 1 named by several rows: 2$"),
        (["1,1", "2,2", "7,7", "10,1", "11,2"], "in its 5 rows: 1 rows without a file: 11$"),
        (
            ["1,1", "3,2", "7,7", "10,1"],
            r"1 without a row: cube_2\.h5; 1 rows without a file: 3$",
        ),
        (
            ["1,1", "2,two", "7,", "10,nan"],
            r"t\.csv has 3 of 4 cells .* no finite numbers: 'two' in column 'a' of line 3, '' in",
        ),
        (["1,1", "2,2,2"], r"has 2 columns \(file, a\), but line 3 has 3 cells"),
        ([], "has no rows"),
    ],
)
def test_what_is_wrong_with_a_table_is_told_in_a_line(lines, words, folder):
    with pytest.raises(hs.HyperslabError, match=words) as raised:
        with_table(folder, "\n".join(["file,a", *lines]))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("file,a\n1,1", {"columns": ["b"]}, r"has no column 'b': it has 'file', 'a'"),
        ("file,a\n1,1", {"columns": ["a"], "key": "name"}, "has no column 'name'"),
        ("file,a,a\n1,1,2", {}, "several columns called 'a'"),
        ("1,2\n3,4", {}, r"begins with numbers \(1, 2\): its first line must have the names"),
        ("file\n1", {}, "has no columns of numbers beside 'file'"),
        ('file,a\n"1,1', {}, "no table of comma-separated values"),
    ],
)
def test_tables_that_cannot_be_used_are_refused(text, options, words, folder):
    with pytest.raises(hs.FormatError, match=words):
        with_table(folder, text, **options)


def test_a_table_names_files_and_not_samples_that_share_one(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((3, 2, 2)))
    (tmp_path / "t.csv").write_text("file,y\na,1\n")
    data = hs.open(tmp_path / "a.npy", axes="NHW")
    with pytest.raises(hs.ConfigError, match=r"a\.npy has 3 samples: give a row to every sample"):
        data.beside(y=hs.table(tmp_path / "t.csv"))


def test_numbers_with_dots_are_no_suffixes(tmp_path):
    for name in ("om_0.25", "om_0.3"):
        np.save(tmp_path / f"{name}.npy", np.full((2, 2), float(name[3:])))
    (tmp_path / "t.csv").write_text("name,y\nom_0.3,0.3\nom_0.25,0.25\n")
    data = hs.open(tmp_path / "om_*.npy", axes="HW").beside(y=hs.table(tmp_path / "t.csv"))
    assert [data.read(i, array="y").tolist() for i in range(2)] == [[0.25], [0.3]]


def test_attributes_of_the_files_are_targets(folder):
    data = opened(folder).beside(y=hs.attributes("mass", "x@origin"), steps=hs.attributes("steps"))
    assert rows(data) == [(n, [n + 0.5, n, -n]) for n in (1, 10, 2, 7)]
    assert rows(data, "steps") == [(n, n) for n in (1, 10, 2, 7)]
    assert data.arrays["steps"].dtype == np.int64
    data.save(folder / "a.json")
    assert rows(hs.open(folder / "a.json")) == rows(data)


def test_attributes_that_are_no_targets_are_refused(folder):
    words = r"cube_1\.h5 has no attribute 'mas': it has 'mass', 'steps'"
    with pytest.raises(hs.FormatError, match=words):
        opened(folder).beside(y=hs.attributes("mas"))
    with pytest.raises(hs.FormatError, match="has nothing called 'z'"):
        opened(folder).beside(y=hs.attributes("z@mass"))
    with h5py.File(folder / "cubes" / "cube_2.h5", "a") as file:
        file.attrs["steps"] = 2.5
        file.attrs["mass"] = "heavy"
    data = opened(folder).beside(steps=hs.attributes("steps"))
    with pytest.raises(hs.FormatError, match=r"cube_2\.h5 has \[2\.5\] as .* int64 was expected"):
        data.read(2, array="steps")
    with pytest.raises(hs.FormatError, match="which is no finite number"):
        opened(folder).beside(y=hs.attributes("mass")).read(2, array="y")


def test_rows_of_one_array_go_with_samples_in_order(folder):
    values = np.arange(8.0).reshape(4, 2)
    np.save(folder / "y.npy", values)
    target = hs.open(folder / "y.npy", axes="NC")
    data = opened(folder).beside(by="row", y=target)
    assert [data.read(i, array="y").tolist() for i in range(4)] == values.tolist()
    assert not data.arrays["y"].is_cut
    with pytest.raises(hs.ConfigError, match="4 rows of 'y' cannot be put beside 2 samples"):
        opened(folder).take([0, 1]).beside(by="row", y=target)


def test_a_table_may_name_partners(tmp_path):
    (tmp_path / "pairs.csv").write_text("image,label\nscan_a,seg3\nscan_b,seg1\nscan_c,seg2\n")
    for number, name in enumerate("bca", start=1):
        np.save(tmp_path / f"seg{number}.npy", np.full((2, 2), number))
        np.save(tmp_path / f"scan_{name}.npy", np.full((2, 2), number))
    images = hs.open(tmp_path / "scan_*.npy", axes="HW")
    labels = hs.open(tmp_path / "seg*.npy", axes="HW")
    data = images.beside(by=tmp_path / "pairs.csv", label=labels)
    assert [int(data.read(i)[0, 0]) for i in range(3)] == [3, 1, 2]
    assert [int(data.read(i, array="label")[0, 0]) for i in range(3)] == [3, 1, 2]
    (tmp_path / "pairs.csv").write_text("image,label\nscan_a,seg3\nscan_b,seg3\nscan_c,seg2\n")
    with pytest.raises(
        hs.ConfigError, match=r"'label' does not name each of 3 files once in its 3"
    ):
        images.beside(by=tmp_path / "pairs.csv", label=labels)
