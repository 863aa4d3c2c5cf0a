import importlib.util
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest

PROGRAM = textwrap.dedent("""
    import itertools, os, sys
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    os.environ["HYPERSLAB_NODE"] = f"node {rank}"
    import hyperslab as hs
    from hyperslab.io.schedule import Position, Schedule

    mesh = hs.init(sample=2, device="cpu")
    data = hs.open(sys.argv[1], axes="NCHW")
    for budget, augment in ((None, None), (4096, None), (None, "cube")):
        batches = Schedule(num_samples=len(data), batch_size=3).batches(Position(0, 0))
        options = {"transport": "mpi", "memory_budget": budget, "augment": augment}
        with hs.Loader(data, mesh, batch_size=3, **options) as loader:
            for x in itertools.chain(loader, loader):
                assert tuple(hs.gather(x)[:, 0, 0, 0].tolist()) == next(batches).indices
    print("right", flush=True)
""")


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun on the PATH")
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="no mpi4py")
def test_boxes_come_from_other_nodes_by_remote_memory_access(tmp_path):
    program, images = tmp_path / "program.py", tmp_path / "images.npy"
    program.write_text(PROGRAM)
    np.save(images, np.arange(7, dtype=np.float32).reshape(7, 1, 1, 1) + np.zeros((1, 1, 16, 16)))
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    done = subprocess.run(
        [*mpirun, sys.executable, str(program), str(images)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "this MPI cannot open memory to other ranks" in done.stderr:
        pytest.skip("an MPI without windows")
    assert done.stdout.count("right") == 2, done.stderr
