"""What a run says before its first step: where it runs, what it learns from, what it holds back."""

from __future__ import annotations

from collections.abc import Mapping

from hyperslab.comm.mesh import Mesh
from hyperslab.io import Dataset
from hyperslab.train.config import Config


def start_report(config: Config, mesh: Mesh, parts: Mapping[str, Dataset]) -> list[str]:
    """Lines for the user: the mesh, the samples of each part, and a batch that is too large."""
    lines = [_ranks(config, mesh), _samples(config, parts)]
    size, num = config.data.batch_size, len(parts["train"])
    if size > num:
        lines.append(
            f"Warning: data.batch_size = {size} is larger than the {num} samples to train on: "
            f"every step takes all {num}, and every epoch is one step"
        )
    return lines


def _ranks(config: Config, mesh: Mesh) -> str:
    if mesh.num_ranks == 1:
        return f"Mesh: one rank on {mesh.device}, no messages"
    store = ""
    if config.data.store == "memory":
        between = "MPI" if config.data.transport == "mpi" else "gloo"
        store = f"; samples by shared memory within a node, by {between} between nodes"
    return (
        f"Mesh: {mesh.grid.describe()}, {mesh.num_ranks} ranks on {mesh.device.type}, messages by "
        f"{_messages(mesh)}{store}"
    )


def _messages(mesh: Mesh) -> str:
    if mesh.transport is not None:
        return "kernels that write into the memory of other GPUs"
    if mesh.stages_through_host:
        return "gloo through host memory, for ranks share a GPU"
    if mesh.backend != "gloo":
        return "NCCL"
    return "gloo" if mesh.sockets is None else "gloo, small ones within a node by sockets"


def _samples(config: Config, parts: Mapping[str, Dataset]) -> str:
    what = "tiles" if config.data.tile is not None else "samples"
    held = [_held_back(config, name, parts.get(name)) for name in ("validation", "test")]
    return f"Data: {len(parts['train'])} {what} to train on; held back: {', '.join(held)}"


def _held_back(config: Config, name: str, part: Dataset | None) -> str:
    chosen = getattr(config.data, name)
    if part is None:
        return f"none for {name} (data.{name} = {chosen:g})"
    if isinstance(chosen, int | float):
        how = f"data.{name} = {chosen:g}, drawn by train.seed = {config.train.seed}"
    else:
        how = f"the files of data.{name}"
    return f"{len(part)} for {name} ({how})"
