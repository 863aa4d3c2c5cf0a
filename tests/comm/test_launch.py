import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import hyperslab.errors
from hyperslab.comm.launch import Launch, choose_port, find_launch, first_host
from hyperslab.errors import ConfigError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29400",
}
SBATCH = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "node[01-03,07],gpu5",
    "SLURM_NTASKS": "11",
    "SLURM_TASKS_PER_NODE": "4(x2),3",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURMD_NODENAME": "node01",
}
SRUN = SBATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NODELIST": "node[02-03],gpu5",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURMD_NODENAME": "gpu5",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node-a-3262@1",
    "PMIX_HOSTNAME": "node-a",
}
TWO_NODES = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
OPENMPI_5 = OPENMPI | TWO_NODES | {"PMIX_HOSTNAME": "node-b"}
OPENMPI_4 = OPENMPI_5 | {
    "PMIX_NAMESPACE": "2138243073",
    "OMPI_MCA_orte_hnp_uri": "2138243072.0;tcp://10.77.0.1,10.1.0.1:36377",
    "OMPI_MCA_orte_local_daemon_uri": "2138243072.1;tcp://10.77.0.2:37117",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {
    "PMI_RANK": "7",
    "PMI_SIZE": "8",
    "PMI_LOCAL_RANK": "3",
    "PMI_LOCAL_SIZE": "4",
    "PALS_APID": "a-b-c",
    "MASTER_ADDR": "x1000",
}


def launch(launcher, rank, num_ranks, local_rank, num_local_ranks, addr, port):
    return Launch(
        launcher=launcher,
        rank=rank,
        num_ranks=num_ranks,
        local_rank=local_rank,
        num_local_ranks=num_local_ranks,
        master_addr=addr,
        master_port=port,
    )


ALONE = launch("alone", 0, 1, 0, 1, None, None)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, ALONE, id="nothing"),
        pytest.param({"RANK": "", "WORLD_SIZE": "1"}, ALONE, id="empty-variables"),
        pytest.param(TORCHRUN, launch("torchrun", 5, 8, 1, 4, "host0", 29400), id="torchrun"),
        pytest.param(
            {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"},
            launch("torchrun", 2, 3, 2, 3, "127.0.0.1", 29400),
            id="by-hand-on-one-node",
        ),
        pytest.param(SRUN, launch("slurm", 9, 11, 1, 3, "node02", choose_port("17.0")), id="srun"),
        pytest.param(
            SRUN | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "1"},
            launch("slurm", 1, 3, 1, 3, "127.0.0.1", choose_port("17.0")),
            id="srun-on-one-node-of-a-larger-job",
        ),
        pytest.param(
            SRUN | {"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_TASKS_PER_NODE": "4"},
            launch("slurm", 9, 11, 1, 4, "node02", choose_port("17.0")),
            id="srun-with-one-count-for-all-nodes",
        ),
        pytest.param(
            SRUN | {"PMI_RANK": "9", "PMI_SIZE": "11", "PMI_JOBID": "17.0"},
            launch("slurm", 9, 11, 1, 3, "node02", choose_port("17.0")),
            id="srun-pmi2",
        ),
        pytest.param(SBATCH, ALONE, id="sbatch-script"),
        pytest.param(
            SRUN | {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"}, ALONE, id="salloc-shell"
        ),
        pytest.param(
            OPENMPI,
            launch("openmpi", 1, 2, 1, 2, "127.0.0.1", choose_port("prterun-node-a-3262@1")),
            id="openmpi-on-one-node",
        ),
        pytest.param(
            OPENMPI_5,
            launch("openmpi", 1, 2, 0, 1, "node-a", choose_port("prterun-node-a-3262@1")),
            id="openmpi-5-on-two-nodes",
        ),
        pytest.param(
            OPENMPI_4,
            launch("openmpi", 1, 2, 0, 1, "10.77.0.1", choose_port("2138243073")),
            id="openmpi-4-on-two-nodes",
        ),
        pytest.param(
            MPICH | {"MASTER_PORT": "29400"},
            launch("mpich", 1, 2, 1, 2, "127.0.0.1", 29400),
            id="mpich-on-one-node",
        ),
        pytest.param(
            MPICH | {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0", "MASTER_ADDR": "host0"},
            launch("mpich", 1, 2, 0, 1, "host0", choose_port("host0")),
            id="mpich-on-two-nodes",
        ),
        pytest.param(PALS, launch("mpich", 7, 8, 3, 4, "x1000", choose_port("a-b-c")), id="pals"),
    ],
)
def test_each_launcher_is_read_from_its_variables(environ, expected):
    assert find_launch(environ) == expected


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        pytest.param(SRUN | TORCHRUN, "torchrun", id="srun-starts-torchrun"),
        pytest.param(OPENMPI | TORCHRUN, "torchrun", id="mpirun-starts-torchrun"),
        pytest.param(SRUN | OPENMPI, "openmpi", id="mpirun-in-a-slurm-job"),
        pytest.param(SRUN | MPICH, "mpich", id="hydra-in-a-slurm-job"),
        pytest.param(SRUN | PALS, "slurm", id="srun-on-a-cray"),
        pytest.param(
            SRUN | {"RANK": "9", "WORLD_SIZE": "11", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
            "slurm",
            id="a-script-copies-the-rank-of-slurm",
        ),
        pytest.param(SRUN | {"WORLD_SIZE": "11"}, "slurm", id="a-script-sets-the-world-size"),
        pytest.param(
            SBATCH | {"RANK": "0", "WORLD_SIZE": "1"}, "torchrun", id="by-hand-in-an-sbatch-script"
        ),
    ],
)
def test_the_innermost_launcher_wins(environ, launcher):
    assert find_launch(environ).launcher == launcher


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "3", "WORLD_SIZE": "2"}, r"^RANK=3 WORLD_SIZE=2: RANK must be below"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, r"RANK=x WORLD_SIZE=2: .*number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, r"RANK=-1 WORLD_SIZE=2: .*number"),
        ({"RANK": "0"}, r"RANK=0 WORLD_SIZE=\(not set\)"),
        ({"WORLD_SIZE": "4"}, r"WORLD_SIZE=4 is set, but neither RANK .*unset WORLD_SIZE"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, r"LOCAL_RANK=4 LOCAL_WORLD_SIZE=4: "),
        (TORCHRUN | {"LOCAL_RANK": ""}, r"LOCAL_RANK=\(not set\) LOCAL_WORLD_SIZE=4"),
        (TORCHRUN | {"MASTER_ADDR": ""}, r"8 ranks .*MASTER_ADDR=\(not set\) MASTER_PORT=29400"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, r"MASTER_PORT=70000 is not a port.*65535"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, r"LOCAL_WORLD_SIZE must be at most WORLD_SIZE"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "many"}, r"SLURM_STEP_TASKS_PER_NODE=many"),
        (SRUN | {"SLURM_NODEID": "one"}, r"SLURM_NODEID=one"),
        (OPENMPI | {"OMPI_COMM_WORLD_SIZE": "1"}, r"^OMPI_COMM_WORLD_RANK=1 OMPI_.*SIZE=1"),
        (
            OPENMPI | TWO_NODES | {"PMIX_NAMESPACE": "7"},
            r"which node rank 0 of 2 runs on: set MASTER_ADDR and MASTER_PORT \(mpirun -x MASTER_",
        ),
        (MPICH | {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}, r"\(mpirun -genv MASTER_ADDR"),
    ],
)
def test_values_that_cannot_be_are_named_with_what_to_do(environ, words):
    with pytest.raises(ConfigError, match=words):
        find_launch(environ)


@pytest.mark.parametrize("environ", [OPENMPI_4, OPENMPI_5])
def test_rank_0_sees_that_it_does_not_run_where_mpirun_does(environ):
    with pytest.raises(ConfigError, match="which node rank 0 of 2 runs on"):
        find_launch(environ | {"OMPI_COMM_WORLD_RANK": "0"})


def test_mpirun_on_the_nodes_of_a_slurm_job_meets_on_the_first():
    job = {"SLURM_JOB_NODELIST": "gpu[7-8]", "SLURMD_NODENAME": "gpu8"}
    assert find_launch(OPENMPI_5 | job).master_addr == "gpu7"


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu5", "gpu5"),
        ("node[01-03,07],gpu5", "node01"),
        ("node[3,1]", "node3"),
        ("gpu5,node[01-03]", "gpu5"),
        ("rack[2-3]n[04-07].lab", "rack2n04.lab"),
        ("a-b[1-2]-ib", "a-b1-ib"),
        ("", None),
    ],
)
def test_the_first_host_of_a_slurm_node_list(nodelist, host):
    assert first_host(nodelist) == host


def test_ports_depend_on_the_key_and_lie_below_those_of_outgoing_connections():
    ports = {choose_port(str(job)) for job in range(1000)}
    assert all(20000 <= port < 30000 for port in ports)
    assert len(ports) > 900
    assert choose_port("17") == choose_port("17")


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun on the PATH")
def test_two_processes_under_a_real_mpirun_find_each_other(tmp_path):
    program = tmp_path / "ranks.py"
    program.write_text(
        textwrap.dedent("""
        import sys
        from pathlib import Path
        import torch
        import torch.distributed as dist
        from hyperslab.comm.launch import find_launch
        launch = find_launch()
        where = f"tcp://{launch.master_addr}:{launch.master_port}"
        dist.init_process_group(
            "gloo", init_method=where, rank=launch.rank, world_size=launch.num_ranks
        )
        total = torch.tensor(launch.rank + 1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        words = f"sum {total.item()}, local {launch.local_rank} of {launch.num_local_ranks}"
        Path(sys.argv[1], f"rank{launch.rank}").write_text(words)
        """)
    )
    is_openmpi = "Open MPI" in _output("mpirun", "--version")
    options = ["--allow-run-as-root", "--oversubscribe"] if is_openmpi else []
    # A shell around the program, as people write them: the ranks then have different parents.
    script = f"{sys.executable} {program} {tmp_path}; exit $?"
    _output("mpirun", *options, "-n", "2", "sh", "-c", script)
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text() == f"sum 3, local {rank} of 2"


def _output(*command):
    source = Path(hyperslab.errors.__file__).parents[1]
    outer = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    environ |= {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout
