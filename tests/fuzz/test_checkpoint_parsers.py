"""Any bytes in place of the files of a checkpoint: they are read, or a CheckpointError names the file."""

import io
import json
import zlib

import numpy as np
import pytest
from absurd import DEEP, LIMIT_S, altered, changed, fuzz, outcome
from hypothesis import example, given
from hypothesis import strategies as st

import meshdist
from meshdist.checkpoint import CheckpointError, load, per_rank, save
from meshdist.checkpoint.__main__ import main

pytestmark = pytest.mark.timeout(LIMIT_S)
TREE = {"w": np.arange(6.0).reshape(2, 3), "l": [np.int8(1), {"own": per_rank(np.ones(2))}], "v": (1.5, b"x", None)}


def save_tree(directory, format):
    return save(directory, TREE, step=1, format=format)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folders of a checkpoint of each format."""
    folder = tmp_path_factory.mktemp("saved")
    formats = ["safetensors", "npy"]
    return {name: meshdist.run(save_tree, 1, args=(folder / name, name))[0] for name in formats}


def read_all(path):
    """Read it in each way in which it is read; return whether it can be."""
    found, message = outcome(lambda: load(path), (CheckpointError, FileNotFoundError))
    if found is None:
        assert str(path.parent if path.suffix else path) in message, message
        assert len(message) < 2000
    return found is not None


def look_at(path, capsys):
    """Have the commands read it: they say what is wrong, or nothing is."""
    for command in ("info", "verify"):
        assert main([command, str(path)]) in (0, 1)
    capsys.readouterr()


# ---- Safetensors

ENTRIES = {
    "__metadata__": {"format": "pt"},
    "a.w": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]},
    "b": {"dtype": "I64", "shape": [], "data_offsets": [8, 16]},
    "none": {"dtype": "U8", "shape": [0, 3], "data_offsets": [16, 16]},
}


def file_of(text, data=bytes(16)):
    return len(text).to_bytes(8, "little") + text + data


FILE = file_of(json.dumps(ENTRIES).encode())


@given(st.one_of(changed(FILE), st.binary(max_size=40).map(file_of), altered(ENTRIES).map(json.dumps)))
@example(file_of(DEEP))
@example(json.dumps({"x": {"dtype": [], "shape": [2], "data_offsets": [0, 16]}}))
@example(json.dumps({"x": {"dtype": "U8", "shape": [0, 2**62, 9], "data_offsets": [0, 0]}}))
@example(json.dumps({f"x.rank{'9' * 5000}": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}}))
@fuzz
def test_a_safetensors_file_is_read_or_refused(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(content.encode()) if isinstance(content, str) else content)
    read_all(path)


INDEX = {"metadata": {"total_size": 16}, "weight_map": {"a.w": "x.safetensors", "b": "x.safetensors"}}


@given(st.one_of(st.binary(max_size=40), changed(json.dumps(INDEX).encode()), altered(INDEX).map(json.dumps)))
@example(DEEP)
@example(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
@example(json.dumps({"weight_map": {"x": "a\0b"}}))
@example(json.dumps({"weight_map": {"x": "x" * 300}}))
@example(json.dumps({"weight_map": {"x": "x/" * 3000}}))
@example(json.dumps({"weight_map": {"x": 3}}))
@fuzz
def test_an_index_is_read_or_refused(tmp_path, content):
    path = tmp_path / "model.safetensors.index.json"
    (tmp_path / "x.safetensors").write_bytes(FILE)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    read_all(path)


# ---- The manifest


def signed(manifest):
    """Return a manifest as a save writes it, with the right checksum."""
    body = json.dumps(manifest).encode()[1:] + b"\n"
    return b'{"crc32": %d,\n' % zlib.crc32(body) + body


def manifest_of(folder):
    found = json.loads((folder / "checkpoint.json").read_bytes())
    del found["crc32"]
    return found


@given(st.data(), st.sampled_from(["safetensors", "npy"]))
@fuzz
def test_a_manifest_is_read_or_refused(saved, capsys, data, format):
    path = saved[format] / "checkpoint.json"
    right = path.read_bytes()
    assert read_all(saved[format])
    try:
        path.write_bytes(data.draw(st.one_of(altered(manifest_of(saved[format])).map(signed), changed(right))))
        read_all(saved[format])
        look_at(saved[format], capsys)
    finally:
        path.write_bytes(right)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["arrays"]["w"].update(file="/etc/passwd"), "is not the name of a file in this folder"),
        (lambda m: m["arrays"]["w"].update(file="../w.npy"), "is not the name of a file in this folder"),
        (lambda m: m["arrays"]["w"].update(shape=[2**40, 2**40]), "array is too big"),
        (lambda m: m["arrays"]["w"].update(shape=[2**30, 2**20], pieces=[]), "array 'w' is not in w.npy"),
        (lambda m: m["arrays"]["w"].update(dtype="object"), "'object' is not a numeric dtype"),
        (lambda m: m["arrays"]["w"].update(dtype=0), "0 is not a dtype"),
        (lambda m: m["arrays"].pop("w"), "the tree has 'w' of kind 'array', which is not an array"),
        (lambda m: m.update(format="pickle"), "format 'pickle' is not one of safetensors, npy, zarr"),
        (lambda m: m.update(structure=["value", ["bytes", "?"]]), "checkpoint.json is damaged, or was not written by"),
        (lambda m: m.update(version="1"), "checkpoint.json is damaged, or was not written by meshdist: TypeError"),
        (lambda m: m.update(version=2), "is of version 2; this meshdist reads up to 1: update it"),
        (lambda m: m.update(more=1), "unexpected keyword argument 'more'"),
    ],
)
def test_what_no_save_writes_is_named(tmp_path, change, message):
    folder = meshdist.run(save_tree, 1, args=(tmp_path, "npy"))[0]
    manifest = manifest_of(folder)
    change(manifest)
    (folder / "checkpoint.json").write_bytes(signed(manifest))
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert str(folder / "checkpoint.json") in str(caught.value)
    assert message in str(caught.value)


def test_json_of_any_depth_is_refused(saved):
    path = saved["npy"] / "checkpoint.json"
    right = path.read_bytes()
    body = b'"version": 1, "x": ' + DEEP
    try:
        path.write_bytes(b'{"crc32": %d,\n' % zlib.crc32(body) + body)
        assert not read_all(saved["npy"])
    finally:
        path.write_bytes(right)


# ---- Headers of npy and metadata of zarr, which `verify` reads


def npy_of(header, version=1):
    text = header if isinstance(header, bytes) else repr(header).encode()
    size = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + text


HEADER = {"descr": "<f8", "fortran_order": False, "shape": (2, 3)}
WORDS = [
    b"{",
    b"'descr'",
    b":",
    b"(",
    b"'<f8'",
    b",",
    b"2",
    b")",
    b"}",
    b"0x",
    b"'''",
    b"\n",
    b"L",
    b"lambda",
    b"-",
    b"~",
]


@given(
    st.one_of(
        changed(npy_of(HEADER)),
        st.lists(st.sampled_from(WORDS)).map(b"".join).map(npy_of),
        st.fixed_dictionaries(
            {name: st.sampled_from(["<f8", False, (2, 3), [("a", "<i4")], 1, "|O"]) for name in HEADER}
        ).map(npy_of),
        st.integers(0, 4).map(lambda version: npy_of(HEADER, version)),
    )
)
@example(npy_of(b"(" * 9000, 2))
@example(npy_of(b"{'descr': '''"))
@fuzz
def test_an_npy_header_is_read_or_refused(saved, capsys, content):
    path = saved["npy"] / "w.npy"
    right, manifest = path.read_bytes(), saved["npy"] / "checkpoint.json"
    before = manifest.read_bytes()
    try:
        path.write_bytes(content.ljust(len(right), b"\n")[: len(right)])
        changed_manifest = manifest_of(saved["npy"])
        changed_manifest["files"]["w.npy"] = [len(right), 128, zlib.crc32(path.read_bytes()[:128])]
        manifest.write_bytes(signed(changed_manifest))
        assert main(["verify", str(saved["npy"])]) in (0, 1)
        said = capsys.readouterr().err
        assert not said or str(path) in said
    finally:
        path.write_bytes(right)
        manifest.write_bytes(before)


@pytest.fixture(scope="module")
def zarr_saved(tmp_path_factory):
    pytest.importorskip("zarr", reason="zarr is not installed")
    return meshdist.run(save_tree, 1, args=(tmp_path_factory.mktemp("zarr"), "zarr"))[0]


@given(st.data(), st.sampled_from(["w", "w", "."]))
@fuzz
def test_zarr_metadata_are_read_or_refused(zarr_saved, capsys, data, which):
    path = zarr_saved / which / "zarr.json"
    right = path.read_bytes()
    documents = altered(json.loads(right)).map(json.dumps).map(str.encode)
    try:
        path.write_bytes(data.draw(st.one_of(documents, changed(right), st.just(DEEP))))
        read_all(zarr_saved)
        look_at(zarr_saved, capsys)
    finally:
        path.write_bytes(right)


def test_the_right_ones_are_read(saved):
    assert read_all(saved["safetensors"])
    assert read_all(saved["npy"])
    header = io.BytesIO((saved["npy"] / "w.npy").read_bytes())
    assert np.load(header).shape == (2, 3)


# ---- The claim of a folder

CLAIM = {"host": "node1", "pid": 7, "member": ["0" * 16, "", "node1", "7", "99"]}


@given(st.one_of(st.binary(max_size=20), altered(CLAIM).map(json.dumps).map(str.encode), st.just(DEEP)))
@fuzz
def test_a_claim_is_respected_or_dropped(tmp_path, content):
    (tmp_path / ".saving").write_bytes(content)
    found, message = outcome(
        lambda: meshdist.run(save_tree, 1, args=(tmp_path / "", "npy")), (CheckpointError, FileExistsError)
    )
    assert found is not None or str(tmp_path) in message
