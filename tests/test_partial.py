import errno
import os

import pytest

from hyperslab.errors import FormatError
from hyperslab.partial import (
    check_capacity,
    explained_writing,
    partial_file,
    remove_leftovers,
    shown_nbytes,
)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_gets_its_name_when_it_is_whole(tmp_path):
    with partial_file(tmp_path / "a") as (path, fd):
        os.write(fd, b"whole")
        assert not (tmp_path / "a").exists()
        assert path.parent == tmp_path
    assert (tmp_path / "a").read_bytes() == b"whole"
    assert names(tmp_path) == ["a"]


def test_the_bytes_are_on_the_disk_before_the_name_and_the_name_at_the_end(tmp_path, disk_log):
    path = tmp_path / "a"
    with partial_file(path) as (_, fd):
        os.write(fd, b"whole")
    assert disk_log.when_synced(path) < disk_log.when_named(path) < disk_log.when_synced(tmp_path)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_nothing_is_left(tmp_path, error):
    (tmp_path / "a").write_text("before")

    def write_half():
        with partial_file(tmp_path / "a") as (_, fd):
            os.write(fd, b"ha")
            raise error

    with pytest.raises(error):
        write_half()
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_text() == "before"


def test_what_a_killed_writer_left_is_removed_and_what_is_being_written_is_not(tmp_path):
    (tmp_path / ".b.0123.part").write_text("half")
    with partial_file(tmp_path / "a") as (path, _):
        assert remove_leftovers([tmp_path]) == 1
        assert names(tmp_path) == [path.name]


def test_a_name_may_be_as_long_as_names_can_be(tmp_path):
    with partial_file(tmp_path / ("x" * 255)):
        pass
    assert names(tmp_path) == ["x" * 255]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk is full"),
        (errno.EFBIG, "larger than files may be"),
        (errno.EACCES, "permission denied"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_errors_of_the_system_are_explained(tmp_path, number, words):
    expected = f"{tmp_path}.*{words}|{words}.*{tmp_path}"
    with pytest.raises(FormatError, match=expected), explained_writing(tmp_path):
        raise OSError(number, os.strerror(number))


def test_a_disk_without_room_is_refused_with_the_numbers(tmp_path):
    check_capacity(tmp_path, 1, "this")
    with pytest.raises(FormatError, match=r"staging needs 1024.0 PiB, and .* are free"):
        check_capacity(tmp_path, 2**60, "staging")


def test_sizes_are_shown_as_people_write_them():
    assert [shown_nbytes(n) for n in (0, 1023, 1024, 3 << 29)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 GiB",
    ]


def test_what_a_link_leads_to_is_written_and_the_link_stays(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with partial_file(tmp_path / "link") as (_, fd):
        os.write(fd, b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"


def test_what_is_no_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with (
        pytest.raises(FormatError, match="it is there, and not a file"),
        partial_file(tmp_path / "pipe"),
    ):
        pass
    assert (tmp_path / "pipe").is_fifo()


def test_bytes_are_on_the_disk_before_the_file_has_its_name(tmp_path, monkeypatch):
    synced = []

    def fsync(fd):
        synced.append((os.path.samestat(os.fstat(fd), tmp_path.stat()), names(tmp_path) == ["a"]))

    monkeypatch.setattr(os, "fsync", fsync)
    with partial_file(tmp_path / "a") as (_, fd):
        os.write(fd, b"whole")
    assert synced == [(False, False), (True, True)], "the file, then the folder with its new name"
