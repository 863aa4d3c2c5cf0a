"""Which rank a process is, as far as its environment tells before any mesh is made."""

from collections.abc import Mapping

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


def rank_of_launcher(environ: Mapping[str, str]) -> int | None:
    """The rank that torchrun, Open MPI, MPICH or Slurm told a process."""
    told = (environ.get(name, "") for name in _RANKS)
    return next((int(each) for each in told if each.isdecimal()), None)
