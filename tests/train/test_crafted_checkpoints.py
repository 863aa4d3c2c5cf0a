"""Checkpoints that somebody made to do harm: no code is run, no other file read, no weight left."""

import os
import pickle
from dataclasses import replace
from io import BytesIO

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
)

import hyperslab as hs
from hyperslab.errors import FormatError
from hyperslab.train import checkpoint_folder
from hyperslab.train.checkpoint_folder import FileSum
from hyperslab.train.checkpoint_tensors import _MetadataUnpickler, read_index
from hyperslab.train.checkpoints import Checkpoints
from hyperslab.train.export import export_run

WEIGHT = "model/weight"


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, proof):
        self.proof = str(proof)

    def __reduce__(self):
        return os.mkdir, (self.proof,)


class Crafted:
    """The checkpoint of a run that one may change, and have its checksums put right."""

    def __init__(self, run):
        self.run, self.folder = run, run / "checkpoints/step_00000001"
        self.proof = run / "proof"
        self.data = self.folder / "__0_0.distcp"
        self.metadata = pickle.loads((self.folder / ".metadata").read_bytes())
        self.manifest = checkpoint_folder.read_manifest(self.folder)
        self.files = dict(self.manifest.files)
        self.model = self.manifest.trees["model"]

    @property
    def entry(self):
        """What the weight is."""
        return self.metadata.state_dict_metadata[WEIGHT]

    @property
    def info(self):
        """Where the weight lies."""
        return self.metadata.storage_data[MetadataIndex(WEIGHT, (0, 0))]

    def move(self, info):
        self.metadata.storage_data[MetadataIndex(WEIGHT, (0, 0))] = info

    def append(self, content):
        """Adds bytes to the file of tensors, and tells where they lie."""
        offset = self.data.stat().st_size
        with self.data.open("ab") as file:
            file.write(content)
        return replace(self.info, offset=offset, length=len(content))

    def write(self):
        (self.folder / ".metadata").write_bytes(pickle.dumps(self.metadata))
        for name in (".metadata", "__0_0.distcp"):
            if name in self.files:
                self.files |= checkpoint_folder.sum_files([self.folder / name])
        manifest = replace(self.manifest, files=self.files)
        checkpoint_folder.write_manifest(manifest, self.folder)


@pytest.fixture
def crafted(tmp_path):
    """A checkpoint of a model whose weights are all 1."""
    (tmp_path / "config.toml").write_text('model.name = "Linear"\ndata.files = "*.h5"\n')
    with Checkpoints(tmp_path / "checkpoints", hs.init(device="cpu")) as checkpoints:
        checkpoints.save(1, {"model": ones(), "values": {"a": 1}})
    return Crafted(tmp_path)


def ones():
    net = nn.Linear(2, 3)
    with torch.no_grad():
        for weight in net.parameters():
            weight.fill_(1)
    return net


def export(crafted):
    export_run(crafted.run, crafted.run / "weights.safetensors")


def load(crafted):
    with Checkpoints(crafted.run / "checkpoints", hs.init(device="cpu")) as checkpoints:
        checkpoints.load({"model": nn.Linear(2, 3)})


both_ways = pytest.mark.parametrize("use", [export, load])


def assert_refused(crafted, use, words):
    with pytest.raises(FormatError, match=words):
        use(crafted)
    assert not crafted.proof.exists()
    assert not (crafted.run / "weights.safetensors").exists()


@both_ways
def test_what_is_not_touched_is_read(crafted, use):
    crafted.write()
    use(crafted)


# Code


@both_ways
def test_an_entry_of_bytes_runs_no_code(crafted, use):
    payload = BytesIO()
    torch.save(Evil(crafted.proof), payload)
    crafted.metadata.storage_data[MetadataIndex(WEIGHT)] = crafted.append(payload.getvalue())
    crafted.metadata.state_dict_metadata[WEIGHT] = BytesStorageMetadata()
    crafted.write()
    assert_refused(crafted, use, r"\.metadata is not to be used .*asks for .*BytesStorageMetadata")


@both_ways
def test_the_list_of_tensors_runs_no_code(crafted, use):
    crafted.metadata = Evil(crafted.proof)
    crafted.write()
    assert_refused(crafted, use, r"it asks for posix\.mkdir, which describes no tensor")


@both_ways
def test_a_tensor_runs_no_code(crafted, use):
    payload = BytesIO()
    torch.save(Evil(crafted.proof), payload)
    crafted.move(crafted.append(payload.getvalue()))
    crafted.write()
    assert_refused(crafted, use, r"__0_0\.distcp holds no torch.float32 tensor of \(3, 2\) at byte")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch", "load"),
        ("torch.distributed.checkpoint.filesystem", "FileSystemWriter"),
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
        ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
        ("builtins", "getattr"),
        ("functools", "partial"),
    ],
)
def test_only_descriptions_of_tensors_are_unpickled(module, name):
    asks = f"\x8c{chr(len(module))}{module}\x8c{chr(len(name))}{name}".encode("latin-1")
    unpickler = _MetadataUnpickler(BytesIO(b"\x80\x04" + asks + b"\x93."))
    with pytest.raises(pickle.UnpicklingError, match=f"it asks for {module}.{name}"):
        unpickler.load()


# Other files


@both_ways
@pytest.mark.parametrize("name", ["{outside}", "../../../outside", "outside", "./__0_0.distcp"])
def test_the_list_of_tensors_names_no_other_files(crafted, use, name):
    outside = crafted.run.parent / "outside"
    outside.write_bytes(crafted.data.read_bytes())
    crafted.move(replace(crafted.info, relative_path=name.format(outside=outside)))
    crafted.write()
    assert_refused(crafted, use, "it names the file '.*', which the manifest does not list")


@both_ways
@pytest.mark.parametrize("name", ["/etc/hostname", "../../config.toml", "..", "a/b", ""])
def test_the_manifest_names_no_other_files(crafted, use, name):
    crafted.files[name] = FileSum(1, 2)
    crafted.write()
    assert_refused(crafted, use, "manifest.json is not to be used .it lists '.*', which is not")


@both_ways
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json"])
def test_links_are_not_followed(crafted, use, name):
    crafted.write()
    outside = crafted.run / "outside"
    (crafted.folder / name).rename(outside)
    (crafted.folder / name).symlink_to(outside)
    assert_refused(crafted, use, f"{name} is a link: put the file itself there")


@both_ways
def test_a_pipe_is_not_waited_for(crafted, use):
    crafted.write()
    crafted.data.unlink()
    os.mkfifo(crafted.data)
    assert_refused(crafted, use, "__0_0.distcp is not a plain file")


def test_the_list_of_tensors_has_a_checksum(crafted):
    del crafted.files[".metadata"]
    crafted.write()
    assert_refused(crafted, load, r"its manifest does not list \.metadata")


# Tensors that are not read


def forget(crafted):
    crafted.entry.chunks.clear()


def shorten(crafted):
    crafted.entry.chunks[0] = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 2]))


def repeat(crafted):
    crafted.entry.chunks *= 2


def overlap(crafted):
    """Two chunks of 2 x 2, which have as many elements as 3 x 2 and a row more."""
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 2])) for row in (0, 1)]
    crafted.entry.chunks[:] = chunks
    crafted.metadata.storage_data[MetadataIndex(WEIGHT, (1, 0))] = crafted.info


def grow(crafted):
    crafted.entry.chunks[0] = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([9, 2]))


@both_ways
@pytest.mark.parametrize("change", [forget, shorten, repeat, overlap, grow])
def test_chunks_cover_a_tensor_once(crafted, use, change):
    change(crafted)
    crafted.write()
    assert_refused(crafted, use, r"chunks of model/weight do not cover \(3, 2\) once|cannot lie in")


@both_ways
def test_a_tensor_that_is_missing_is_told(crafted, use):
    del crafted.metadata.state_dict_metadata[WEIGHT]
    crafted.write()
    assert_refused(crafted, use, "model/weight is in the manifest or in the files, but not in both")


@both_ways
def test_two_weights_do_not_share_a_tensor(crafted, use):
    """So that the second would be read into the place of the first, which stays as it is."""
    crafted.model["bias"] = crafted.model["weight"]
    crafted.write()
    assert_refused(crafted, use, "model/weight stands for more than one tensor")


@both_ways
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("shape", [2, 3], r"model/weight is \(3, 2\) torch.float32 in the files, and \(2, 3\)"),
        ("shape", [10**12, 2], r"and \(1000000000000, 2\) torch.float32 in the manifest"),
        ("dtype", "int32", r"and \(3, 2\) torch.int32 in the manifest"),
        ("dtype", "load", "model/weight has the dtype 'load', which torch lacks"),
    ],
)
def test_manifest_and_files_tell_the_same(crafted, use, key, value, words):
    crafted.model["weight"][key] = value
    crafted.write()
    assert_refused(crafted, use, words)


@both_ways
@pytest.mark.parametrize(
    "content",
    [
        torch.ones(3, 3),
        torch.ones(3, 2, dtype=torch.float64),
        torch.ones(3, 2, device="meta"),
        torch.ones(3, 2).to_sparse(),
        {"weight": torch.ones(3, 2)},
    ],
    ids=["shape", "dtype", "meta", "sparse", "dict"],
)
def test_another_tensor_than_was_announced_is_refused(crafted, use, content):
    payload = BytesIO()
    torch.save(content, payload)
    crafted.move(crafted.append(payload.getvalue()))
    crafted.write()
    assert_refused(crafted, use, r"holds no torch.float32 tensor of \(3, 2\) at byte")


@both_ways
def test_older_kinds_of_torch_files_are_refused(crafted, use):
    """In them a tensor may have memory that nobody filled."""
    payload = BytesIO()
    torch.save(torch.ones(3, 2), payload, _use_new_zipfile_serialization=False)
    crafted.move(crafted.append(payload.getvalue()))
    crafted.write()
    assert_refused(crafted, use, "its first bytes are others")


@both_ways
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"length": 10}, "6 numbers cannot lie in 10 bytes"),
        ({"offset": 10**6}, "at byte 1000000 of __0_0.distcp, which has [0-9]+"),
        ({"offset": -1}, "are no whole numbers from 0"),
        ({"offset": 0.0}, "are no whole numbers from 0"),
        ({"transform_descriptors": ["stream.zstd"]}, "is encoded, by ..stream.zstd.."),
    ],
)
def test_places_outside_of_files_are_refused(crafted, use, change, words):
    crafted.move(replace(crafted.info, **change))
    crafted.write()
    assert_refused(crafted, use, words)


def test_whatever_is_flipped_the_list_is_right_or_refused(crafted):
    """One bit of it, with the checksums put right: no other error, and no other weights."""
    content, expected = (crafted.folder / ".metadata").read_bytes(), read_index_of(crafted)
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        (crafted.folder / ".metadata").write_bytes(changed)
        try:
            found = read_index_of(crafted)
        except FormatError:
            continue
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert (tensor.shape, tensor.dtype) == (expected[name].shape, expected[name].dtype)


def read_index_of(crafted):
    return read_index(crafted.folder, crafted.manifest)


# Several ranks


def refused_on_ranks(run):
    mesh = hs.init(sample=2, device="cpu")
    with Checkpoints(run / "checkpoints", mesh) as checkpoints, pytest.raises(FormatError) as error:
        checkpoints.load({"model": hs.parallelize(nn.Linear(2, 3), mesh, shard_weights=True)})
    return str(error.value)


def test_all_ranks_refuse_alike(crafted, team_of):
    forget(crafted)
    crafted.write()
    told = team_of(2).run(refused_on_ranks, run=crafted.run)
    assert told[0] == told[1]
    assert "chunks of model/weight do not cover" in told[0]
