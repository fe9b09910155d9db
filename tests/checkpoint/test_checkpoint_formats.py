"""Checkpoints open without this library, and those of others open here."""

import errno
import importlib
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from checkpoint_trees import DTYPES, mesh_of, placed, same, save_random, whole_arrays
from worlds import needs_linux

import meshdist
from meshdist.checkpoint import CheckpointError, load, save
from meshdist.checkpoint.__main__ import main
from meshdist.tensor import Shard, empty


@pytest.fixture
def safetensors():
    return pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")


def test_safetensors_reads_every_file(safetensors, tmp_path):
    meshdist.run(save_random, 4, args=(tmp_path, (2, 2), 0, {"max_file_bytes": 500}))
    folder = tmp_path / "step-0"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, entry in importlib.import_module("safetensors").deserialize(file.read_bytes()):
            assert index["weight_map"][name] == file.name
            found[name] = entry
    assert found.keys() == index["weight_map"].keys()
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(len(entry["data"]) for entry in found.values())
    for name, array in whole_arrays(0).items():
        entry = found[f"model.{name}"]
        assert bytes(entry["data"]) == array.tobytes()
        pair = [2] if array.dtype.kind == "c" else []
        assert entry["shape"] == [*array.shape, *pair]
    codes = {name: found[f"model.x{number}"]["dtype"] for number, name in enumerate(DTYPES)}
    assert codes["bfloat16"] == "BF16"
    assert codes["float8_e4m3fn"] == "F8_E4M3"
    assert codes["complex64"] == "F32"
    assert codes["float8_e4m3b11fnuz"] == "U8"  # bits
    assert found["own.rank00003"]["shape"] == [4]


def load_cut(path):
    mesh = mesh_of((3,))
    like = {"w": {"x": empty((7, 5), np.float32, mesh=mesh, placements=[Shard(1)])}, "b": np.zeros(2, np.float16)}
    found = load(path, like)
    return found["w"]["x"].to_local(), found["b"]


@pytest.mark.parametrize("which", ["file", "folder", "index"])
def test_files_of_others_are_cut_on_the_way_in(safetensors, tmp_path, which):
    arrays = {"w.x": np.arange(35, dtype=np.float32).reshape(7, 5), "b": np.ones(2, np.float16)}
    safetensors.save_file({"w.x": arrays["w.x"]}, tmp_path / "model-00001-of-00002.safetensors", {"format": "pt"})
    safetensors.save_file({"b": arrays["b"]}, tmp_path / "model-00002-of-00002.safetensors")
    path = tmp_path
    if which == "file":
        path = tmp_path / "all.safetensors"
        safetensors.save_file(arrays, path)
    if which == "index":
        path = tmp_path / "model.safetensors.index.json"
        files = {"w.x": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        path.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    for (block, b), part in zip(meshdist.run(load_cut, 3, args=(path,)), [(0, 2), (2, 4), (4, 5)], strict=True):
        np.testing.assert_array_equal(block, arrays["w.x"][:, slice(*part)])
        assert b.tolist() == [1, 1]
    assert {name: same(array, arrays[name]) for name, array in load(path).items()} == {"w.x": True, "b": True}


def header(entries, data=b"", length=None):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a safetensors file, or is truncated: it has 0 bytes"),
        (b"PK\3\4" * 10, "is not a safetensors file, or is truncated: it has 40 bytes"),
        (header({"x": GOOD}, length=1 << 62), "is truncated"),
        (header(b"no json"), "its header does not describe arrays"),
        (header(b"[1]"), "its header does not describe arrays"),
        (header({"x": {"dtype": "F32"}}), "its header does not describe arrays"),
        (header({"x": GOOD}, b"1234567"), "is damaged: array 'x' of F32 and shape [2] is said to lie at bytes 0 to 8"),
        (header({"x": GOOD}, b"123456789"), "is truncated or damaged: 8 bytes of arrays, 9 found"),
        (
            header({"x": {**GOOD, "dtype": "F4"}}, b"12345678"),
            "array 'x' has the unsupported dtype F4; supported are BOOL, U8",
        ),
        (header({"x": {**GOOD, "shape": [3]}}, b"12345678"), "is damaged: array 'x' of F32 and shape [3]"),
        (header({"x": {**GOOD, "shape": [-2]}}, b"12345678"), "is damaged: array 'x' of F32 and shape [-2]"),
        (header({"x": {**GOOD, "shape": "22"}}, b"12345678"), "is damaged: array 'x' of F32"),
        (header({"x": GOOD, "y": GOOD}, b"12345678"), "is damaged: array 'y'"),
        (header({"x": {**GOOD, "data_offsets": [0, "8"]}}, b"12345678"), "its header does not describe arrays"),
        (header({"x": {**GOOD, "data_offsets": [0]}}, b"12345678"), "its header does not describe arrays"),
        (header({"x": {**GOOD, "data_offsets": [4, 12]}}, b"123456789012"), "is damaged: array 'x'"),
    ],
)
def test_foreign_files_are_refused_in_a_sentence(tmp_path, content, message):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"x\.safetensors.*{re.escape(message)}"):
        load(path)


def test_an_index_must_fit_its_files(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="not an index: it has no weight_map"):
        load(tmp_path)
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    with pytest.raises(CheckpointError, match="a.safetensors is missing: model.safetensors.index.json names it"):
        load(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(header({"y": GOOD}, b"12345678"))
    with pytest.raises(CheckpointError, match=r"a.safetensors lacks array 'x', which model.safetensors.index.json"):
        load(tmp_path)


def test_numpy_reads_every_npy(tmp_path):
    def program():
        save(tmp_path, placed(whole_arrays(3), mesh_of((2,)), 3), format="npy")

    meshdist.run(program, 2)
    for name, array in whole_arrays(3).items():
        found = np.load(tmp_path / "step-0" / f"{name}.npy")
        assert found.shape == array.shape
        assert found.tobytes() == array.tobytes()


def test_zarr_reads_what_each_rank_wrote_as_a_chunk(tmp_path):
    zarr = pytest.importorskip("zarr", minversion="3", reason="zarr 3 is not installed")
    whole = np.arange(70.0).reshape(7, 10)

    def program():
        mesh = mesh_of((2, 2))
        tree = {"w": empty((7, 10), mesh=mesh, placements=[Shard(0), Shard(1)])}
        tree["w"].to_local()[...] = whole[tree["w"].index]
        save(tmp_path, tree, format="zarr")

    meshdist.run(program, 4)
    found = zarr.open_group(tmp_path / "step-0", mode="r")["w"]
    np.testing.assert_array_equal(found[...], whole)
    assert found.chunks == (4, 5)
    chunk = tmp_path / "step-0" / "w" / "c" / "1" / "1"
    good = chunk.read_bytes()
    chunk.write_bytes(good[:9] + bytes([good[9] ^ 1]) + good[10:])
    with pytest.raises(CheckpointError, match=r"w is damaged: array 'w' is not what was written, at \[4:7, 5:10\]"):
        load(tmp_path)
    chunk.write_bytes(good[:9])
    with pytest.raises(CheckpointError, match=r"step-0/w/c/1/1 is damaged: it has 9 bytes, 160 were written$"):
        load(tmp_path)


@needs_linux
def test_zarr_names_the_chunk_for_which_no_room_is_left(tmp_path, monkeypatch):
    zarr = pytest.importorskip("zarr", minversion="3", reason="zarr 3 is not installed")

    def full(self, key, value):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(zarr.Array, "__setitem__", full)

    def program():
        expected = r"No space left on device: .*/\.step-0-.*/w/c/0$"
        with pytest.raises(OSError, match=expected) as caught:
            save(tmp_path, {"w": np.ones(3)}, format="zarr")
        assert caught.value.errno == errno.ENOSPC

    meshdist.run(program, 1)
    assert not list(tmp_path.iterdir())


def test_our_own_checkpoints_do_without_the_index_of_others(tmp_path, capsys):
    def program():
        return save(tmp_path, {"a": np.ones(2), "b": np.zeros(3)}, max_file_bytes=8)

    folder = meshdist.run(program, 1)[0]
    index = folder / "model.safetensors.index.json"
    index.unlink()
    assert load(folder)["b"].tolist() == [0, 0, 0]
    assert main(["verify", str(folder)]) == 1
    assert f"{index} is missing" in capsys.readouterr().err


# ---- The command


@pytest.fixture
def saved(tmp_path):
    meshdist.run(save_random, 2, args=(tmp_path / "run", (2,), 0, {"step": 7}))
    return tmp_path / "run"


def test_info_lists_the_arrays(saved, capsys):
    assert main(["info", str(saved)]) == 0
    out = capsys.readouterr().out
    assert "own.rank00001" in out
    assert re.search(r"step 7, 17 arrays, .*, safetensors, written by 2 ranks \(process \d+ on ", out.replace("\n", ""))


def test_info_does_without_rich(saved, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["info", str(saved / "step-7")]) == 0
    assert re.search(r"^array +dtype +shape +size +pieces +file$", capsys.readouterr().out, re.MULTILINE)


def test_info_draws_a_table_on_a_terminal(saved, capsys, monkeypatch):
    pytest.importorskip("rich", reason="rich is not installed")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["info", str(saved)]) == 0
    assert re.search(r"│ +own\.rank00001 +│ +int64 ", capsys.readouterr().out)


@pytest.mark.slow
def test_info_writes_a_line_for_each_array_into_a_pipe(tmp_path):
    names = ["layers.0." + "long" * 30, *(f"n{n:04}" * 30 for n in range(2000))]
    meshdist.run(lambda: save(tmp_path, dict.fromkeys(names, np.float64(1))), 1)
    command = [sys.executable, "-m", "meshdist.checkpoint", "info", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shown = {name for name, dtype, *_ in map(str.split, done.stdout.splitlines()) if dtype == "float64"}
    assert sorted(set(names) - shown) == []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as piped:
        assert piped.stdout.readline().startswith("array ")
        piped.stdout.close()  # as `head -1` does
        assert piped.stderr.read() == ""


def test_verify_names_what_is_damaged(saved, capsys):
    assert main(["verify", str(saved)]) == 0
    assert "step-7 is as it was written: step 7" in capsys.readouterr().out
    path = saved / "step-7" / "model.safetensors"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert main(["verify", str(saved)]) == 1
    assert re.search(r"model.safetensors is damaged: array '.*' is not what was written", capsys.readouterr().err)
    assert main(["verify", str(saved / "none")]) == 1
    assert "there is no checkpoint at" in capsys.readouterr().err


def test_verify_reads_the_metadata_of_zarr(tmp_path, capsys):
    pytest.importorskip("zarr", minversion="3", reason="zarr 3 is not installed")
    tree = {"w": np.arange(7.0), "zeros": np.zeros((2, 3), complex), "flag": np.True_, "none": np.zeros((0, 2))}
    folder = meshdist.run(lambda: save(tmp_path, tree, format="zarr"), 2)[0]
    assert main(["verify", str(folder)]) == 0

    def check(path, text, message):
        good = path.read_bytes()
        path.unlink() if text is None else path.write_bytes(text(good))
        assert main(["verify", str(folder)]) == 1
        assert message in capsys.readouterr().err
        path.write_bytes(good)

    root, w = folder / "zarr.json", folder / "w" / "zarr.json"
    for path in (root, w):
        for text in (None, lambda good: good[:20], lambda good: bytes(len(good)), lambda good: b"[]"):
            check(path, text, f"{path} is missing or damaged: ")
    check(root, lambda good: w.read_bytes(), f"{root} is missing or damaged: ")
    fill = '"fill_value": 0.0'
    check(w, lambda good: good.replace(fill.encode(), b'"fill_value": 1.0'), f"{w} is damaged: fill_value is 1.0, 0.0")
    check(w, lambda good: good.replace(b"little", b"big"), f"{w} is damaged: codecs is ")
    no_rows = (b'"chunk_shape": [\n        7', b'"chunk_shape": [\n        0')
    check(w, lambda good: good.replace(*no_rows), f"{w.parent} is damaged: its chunks have shape (0,)")
    assert main(["verify", str(folder)]) == 0


@pytest.mark.parametrize("format", ["npy", "safetensors", "zarr"])
def test_convert_keeps_everything(saved, tmp_path, capsys, format):
    if format == "zarr":
        pytest.importorskip("zarr", minversion="3", reason="zarr 3 is not installed")
    to = tmp_path / "converted"
    assert main(["convert", str(saved), str(to), "--format", format, "--max-file-bytes", "300"]) == 0
    assert f", {format}, written by 1 rank " in capsys.readouterr().out
    before, after = load(saved), load(to)
    assert {name: same(after["model"][name], array) for name, array in before["model"].items()}
    assert after["losses"] == before["losses"]
    assert [array.tolist() for array in after["own"]] == [[0], [0, 1]]
    assert main(["convert", str(saved), str(to)]) == 1
    assert "converted exists already" in capsys.readouterr().err


def test_convert_takes_files_of_others(safetensors, tmp_path):
    safetensors.save_file({"a.b": np.ones(3)}, tmp_path / "x.safetensors")
    assert main(["convert", str(tmp_path / "x.safetensors"), str(tmp_path / "npy"), "--format", "npy"]) == 0
    assert np.load(tmp_path / "npy" / "a.b.npy").tolist() == [1, 1, 1]
    assert main(["verify", str(tmp_path / "x.safetensors")]) == 0
