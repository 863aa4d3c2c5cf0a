import pytest

from hyperslab.cli.machine import find_machine, read_cpu_quotas, read_memory_limits


@pytest.fixture
def make_file(tmp_path):
    def make(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    return make


def test_limits_of_every_cgroup_around_the_process_count(tmp_path, make_file):
    make_file("proc/self/cgroup", "0::/jobs/job7\n")
    make_file("sys/fs/cgroup/jobs/job7/memory.max", "max\n")
    make_file("sys/fs/cgroup/jobs/memory.max", "4096\n")
    make_file("sys/fs/cgroup/jobs/job7/cpu.max", "150000 100000\n")
    make_file("sys/fs/cgroup/jobs/cpu.max", "max 100000\n")
    assert read_memory_limits(tmp_path) == [4096]
    assert read_cpu_quotas(tmp_path) == [1.5]


def test_limits_are_read_from_version_1_cgroups_too(tmp_path, make_file):
    make_file("proc/self/cgroup", "5:memory:/job7\n4:cpu,cpuacct:/job7\n1:name=systemd:/\n")
    make_file("sys/fs/cgroup/memory/job7/memory.limit_in_bytes", "4096\n")
    make_file("sys/fs/cgroup/cpu/job7/cpu.cfs_quota_us", "300000\n")
    make_file("sys/fs/cgroup/cpu/job7/cpu.cfs_period_us", "100000\n")
    make_file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    make_file("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert read_memory_limits(tmp_path) == [4096]
    assert read_cpu_quotas(tmp_path) == [3.0]


def test_without_cgroups_there_are_no_limits(tmp_path):
    assert read_memory_limits(tmp_path) == []
    assert read_cpu_quotas(tmp_path) == []


def test_this_machine_has_cores_and_memory():
    machine = find_machine()
    assert machine["cpu_cores"] > 0
    assert machine["memory_nbytes"] > 2**20
