import pytest

from hyperslab.errors import ConfigError
from hyperslab.store import slots
from hyperslab.store.budget import free_memory, parse_nbytes

GiB = 2**30


def machine(root, available_kb=100 * 2**20, cgroup="0::/job", **files):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {available_kb} kB\n")
    (root / "proc/self/cgroup").write_text(cgroup + "\n")
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_of_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_limits_free_memory_is_what_the_machine_has(tmp_path):
    assert free_memory(machine(tmp_path)) == 100 * GiB


def test_the_limit_of_the_control_group_counts_without_pages_of_files(tmp_path):
    root = machine(
        tmp_path,
        job__memory_of_max=str(8 * GiB),
        job__memory_of_current=str(5 * GiB),
        job__memory_of_stat=f"anon 7\ninactive_file {2 * GiB}\n",
    )
    assert free_memory(root) == 5 * GiB


def test_the_limit_of_an_outer_control_group_may_be_tighter(tmp_path):
    root = machine(
        tmp_path,
        cgroup="0::/slice/job",
        slice__job__memory_of_max="max",
        slice__job__memory_of_current="0",
        slice__job__memory_of_stat="",
        slice__memory_of_max=str(3 * GiB),
        slice__memory_of_current=str(GiB),
        slice__memory_of_stat="",
    )
    assert free_memory(root) == 2 * GiB


def test_limits_of_control_groups_of_version_1_count(tmp_path):
    root = machine(
        tmp_path,
        cgroup="5:cpu,memory:/docker",
        memory__docker__memory_of_limit_in_bytes=str(4 * GiB),
        memory__docker__memory_of_usage_in_bytes=str(GiB),
        memory__docker__memory_of_stat="total_inactive_file 0\n",
    )
    assert free_memory(root) == 3 * GiB


def test_free_memory_is_never_below_nothing(tmp_path):
    assert free_memory(machine(tmp_path, available_kb=0)) == 0


@pytest.mark.parametrize("words", ["80 apples", "GiB", "1.2.3G", "-5", ".", ""])
def test_sizes_that_are_none_are_refused(words):
    with pytest.raises(ConfigError):
        parse_nbytes(words)


def test_two_loaders_do_not_promise_the_same_memory(monkeypatch):
    monkeypatch.setattr(slots, "free_memory", lambda: 10_000)
    first = slots.OwnSlots(8, 1000, 1, None, None)
    second = slots.OwnSlots(8, 1000, 1, None, None)
    try:
        assert (first.holding.num_memory, second.holding.num_memory) == (5, 0)
    finally:
        first.close()
        second.close()
