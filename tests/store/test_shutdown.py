"""However a loop ends, threads end with it, and nothing stays behind."""

import gc
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import hyperslab as hs


@pytest.fixture
def data(tmp_path):
    np.save(tmp_path / "images.npy", np.arange(12.0).reshape(12, 1, 1, 1) + np.zeros((1, 1, 8, 8)))
    return hs.open(tmp_path / "images.npy", axes="NCHW")


def loader_threads():
    return [t for t in threading.enumerate() if t.name.startswith("hyperslab-")]


@pytest.mark.parametrize("store", ["memory", "none"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_threads_end_when_a_loader_is_forgotten_in_the_middle(store, prefetch, data):
    before = set(loader_threads())
    loader = hs.Loader(data, batch_size=2, store=store, prefetch=prefetch, threads=2)
    next(iter(loader.numpy()))
    assert len(set(loader_threads()) - before) == 3
    del loader
    gc.collect()
    assert_threads_end(before)


def assert_threads_end(before):
    deadline = time.monotonic() + 60
    while set(loader_threads()) - before and time.monotonic() < deadline:
        time.sleep(0.005)
    assert set(loader_threads()) <= before


def test_an_error_in_the_loop_leaves_the_loader_usable(data):
    loader = hs.Loader(data, batch_size=2, shuffle="none")

    def fail():
        for _ in loader.numpy():
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [int(x[0, 0, 0, 0]) for x in loader.numpy()] == [0, 2, 4, 6, 8, 10]
    loader.close()
    assert len(list(loader.numpy())) == 6
    loader.close()


def test_a_loop_cannot_go_on_beside_a_newer_one(data):
    with hs.Loader(data, batch_size=2) as loader:
        older = iter(loader.numpy())
        next(older)
        next(iter(loader.numpy()))
        with pytest.raises(hs.ConfigError, match="another was begun"):
            next(older)


def test_descriptors_are_given_back(data):
    def count():
        return len(list(Path("/proc/self/fd").iterdir()))

    def use():
        with hs.Loader(data, batch_size=2) as loader:
            for _ in loader.numpy():
                pass

    use()
    before = count()
    for _ in range(5):
        use()
    assert count() <= before


PROGRAM = textwrap.dedent("""
    import sys, time
    import hyperslab as hs

    data = hs.open(sys.argv[1], axes="NCHW")
    loader = hs.Loader(data, batch_size=2, store=sys.argv[2])
    while True:
        for _ in loader.numpy():
            print("step", flush=True)
            time.sleep(0.01)
""")


@pytest.mark.parametrize("store", ["memory", "none"])
def test_ctrl_c_ends_a_program_at_once(store, data, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, str(program), str(data.paths[0]), store],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert process.returncode in (-signal.SIGINT, 130, 1)


def test_numpy_batches_need_no_torch(data):
    code = (
        "import sys, hyperslab as hs\n"
        "loader = hs.Loader(hs.open(sys.argv[1], axes='NCHW'), batch_size=5, augment='cube')\n"
        "assert [len(x) for x in loader.numpy()] == [5, 5, 2]\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(data.paths[0])], check=True)


def test_a_loader_that_failed_and_is_forgotten_ends_its_threads(data):
    before = set(loader_threads())
    data.read(0)
    data.paths[0].write_bytes(b"something else")
    broken = data

    def fail():
        with pytest.raises(hs.FormatError):
            list(hs.Loader(broken, batch_size=2).numpy())

    for _ in range(3):
        fail()
    gc.collect()
    assert_threads_end(before)


def test_a_dataset_can_be_pickled(data):
    other = pickle.loads(pickle.dumps(data))
    np.testing.assert_array_equal(other.read(3), data.read(3))


def test_no_sample_at_all_is_an_error(data, tmp_path):
    for index in range(3):
        (tmp_path / f"{index}.raw").write_bytes(b"")
    (tmp_path / "0.raw").write_bytes(bytes(16))
    data = hs.open(tmp_path / "*.raw", dtype="float32", shape=(1, 2, 2), axes="CHW").take([1, 2])
    with hs.Loader(data, bad_samples="skip") as loader:
        for _ in range(2):
            with pytest.raises(
                hs.FormatError, match=r"none of 2 samples could be read.*\.raw is empty"
            ):
                list(loader.numpy())
