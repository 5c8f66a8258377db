"""Tensors as bytes and back, without a model: pieces and blocks of files, what is read of them, what damage hits."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.checkpoint import DamagedCheckpointError, tools, writer
from rayrec.checkpoint.errors import Damage, named
from rayrec.checkpoint.format import DTYPES, INDEX, DataFile, Index, Piece, SavedTensor, header
from rayrec.checkpoint.manifest import Manifest, sha256
from rayrec.checkpoint.reader import Reader
from rayrec.checkpoint.rectangles import Rectangle, Rectangles
from rayrec.checkpoint.writer import Item, StoppedError, Throttle, snapshot, write
from rayrec.storage import LocalFolder

SHAPES = st.lists(st.integers(0, 7), max_size=3)
KINDS = st.sampled_from([torch.float32, torch.float64, torch.int8, torch.float16])


def numbers(shape: list[int], dtype: torch.dtype, begin: int = 0) -> torch.Tensor:
    return (torch.arange(begin, begin + math.prod(shape)) % 120).to(dtype).reshape(shape)


def pieces_of(tensor: torch.Tensor, max_bytes: int) -> list[Rectangle]:
    return list(Rectangle((0,) * tensor.dim(), tensor).pieces(max_bytes))


@contextmanager
def written(tensors: dict[str, torch.Tensor], max_bytes: int, ranks: int, block_bytes: int) -> Iterator[Any]:
    """A reader of tensors whose pieces `ranks` have written in turn, in blocks of about `block_bytes`."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "BLOCK_BYTES", block_bytes)
        folder = LocalFolder(Path(name) / "step_00000001-0001")
        items = [
            Item(key, tuple(tensor.shape), part.offsets, part.tensor)
            for key, tensor in tensors.items()
            for part in pieces_of(tensor, max_bytes)
        ]
        data = Index.joined([write(folder, rank, items[rank::ranks]) for rank in range(ranks)]).to_json()
        folder.write(INDEX, data)
        with Reader(folder, manifest(data)) as reader:
            yield reader


def manifest(index: bytes) -> Manifest:
    none: dict[str, Any] = {}
    told: Any = {"step": 1, "attempt": 1, "time": 0.0, "world_size": 1, "iteration": 0, "plan": none, "extra": none}
    return Manifest(**told, mapping=None, index_size=len(index), index_sha256=sha256(index))


@given(SHAPES, KINDS, st.integers(1, 200))
def test_pieces_tile_a_tensor_within_their_bytes(shape: list[int], dtype: torch.dtype, max_bytes: int) -> None:
    tensor = numbers(shape, dtype)
    parts, count = pieces_of(tensor, max_bytes), torch.zeros(shape)
    for part in parts:
        places = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.tensor.shape, strict=True))
        torch.testing.assert_close(tensor[places], part.tensor, rtol=0, atol=0)
        count[places] += 1
        assert part.tensor.nbytes <= max(max_bytes, dtype.itemsize)
    assert bool((count == 1).all())
    if tensor.nbytes <= max_bytes:
        assert len(parts) == 1
    rows = shape[0] if shape else 1
    if rows > 1 and tensor.numel() and tensor.nbytes // rows <= max_bytes < tensor.nbytes:
        assert len(parts) == -(-rows // (max_bytes // (tensor.nbytes // rows)))


@settings(max_examples=50)
@given(st.lists(st.tuples(SHAPES, KINDS), min_size=1, max_size=4), st.integers(1, 100), st.integers(1, 60), st.data())
def test_any_rows_come_back_from_any_pieces(shapes: Any, max_bytes: int, block_bytes: int, data: st.DataObject) -> None:
    tensors = {f"dense/{n}": numbers(shape, dtype, 7 * n) for n, (shape, dtype) in enumerate(shapes)}
    with written(tensors, max_bytes, data.draw(st.integers(1, 3)), block_bytes) as reader:
        assert list(reader.damages()) == []
        asked, expected = {}, {}
        for key, tensor in tensors.items():
            torch.testing.assert_close(reader.tensor(key), tensor, rtol=0, atol=0)
            if tensor.dim():
                rows = slice(data.draw(st.integers(0, 8)), data.draw(st.integers(0, 8)))
                torch.testing.assert_close(reader.tensor(key, rows), tensor[rows], rtol=0, atol=0)
            spans = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in tensor.shape]
            expected[key] = tensor[tuple(slice(a, b) for a, b in spans)].to(torch.float64)
            room = torch.full_like(expected[key], -1, dtype=data.draw(st.sampled_from([tensor.dtype, torch.float64])))
            asked[key] = Rectangles(tensor.shape, [Rectangle(tuple(a for a, _ in spans), room)])
        reader.fill(dict(asked))
        for key, held in asked.items():
            torch.testing.assert_close(held.rectangles[0].tensor.to(torch.float64), expected[key], rtol=0, atol=0)


def test_a_reader_may_be_entered_again() -> None:
    with written({"table/a": numbers([9, 2], torch.float32)}, 40, 2, 16) as reader:
        for _ in range(2):
            with reader:
                torch.testing.assert_close(reader.tensor("table/a"), numbers([9, 2], torch.float32))


def test_damage_is_told_of_its_block_alone() -> None:
    """Rows of 8 bytes in blocks of two; the second piece begins at row 5."""
    tensor = numbers([9, 2], torch.float32)
    with written({"table/a": tensor}, 40, 2, 16) as reader:
        folder = Path(reader.folder.path)
        file = folder / "data-00001.safetensors"
        whole = file.read_bytes()
        (begin,) = (piece.begin for _, _, piece in reader.index.pieces() if piece.file == file.name)
        rotten = bytearray(whole)
        rotten[begin + 16] ^= 1  # the first byte of rows 7 and 8
        file.write_bytes(rotten)
        mismatch = "the bytes do not match their checksum"
        assert list(reader.damages()) == [Damage(file.name, mismatch, "table/a", (7, 9))]
        torch.testing.assert_close(reader.tensor("table/a", slice(0, 7)), tensor[:7])
        with pytest.raises(DamagedCheckpointError, match=r"table 'a', rows \[7, 9\)\): the bytes do not match"):
            reader.tensor("table/a", slice(8, 9))
        file.write_bytes(whole[: begin + 17])
        ends = "the file ends before these rows"
        assert list(reader.damages()) == [Damage(file.name, ends, "table/a", (7, 9))]
        file.write_bytes(whole[: begin + 15])
        assert [damage.rows for damage in reader.damages()] == [(5, 7), (7, 9)]


class Noting(LocalFolder):
    """Notes the ranges that are read, and those that are told not to be read again."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.read_: list[tuple[int, int]] = []
        self.forgotten: list[tuple[int, int]] = []

    @contextmanager
    def open(self, name: str) -> Iterator[Any]:
        noting = self
        with super().open(name) as source:

            class Source:
                def read_into(self, offset: int, view: memoryview) -> int:
                    noting.read_.append((offset, len(view)))
                    return source.read_into(offset, view)

                def forget(self, offset: int, nbytes: int) -> None:
                    noting.forgotten.append((offset, nbytes))

            yield Source()


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(("rows", "forgotten"), [((2, 6), True), ((3, 5), False)])
def test_whole_blocks_go_where_they_are_wanted_and_are_forgotten(
    rows: tuple[int, int], forgotten: bool, remote: bool
) -> None:
    """Rows of 8 bytes in blocks of two; a block of which others may read the rest stays. Far away they are asked for
    at once."""
    tensor = numbers([9, 2], torch.float32)
    with written({"table/a": tensor}, 1000, 1, 16) as made:
        folder = Noting(Path(made.folder.path))
        folder.remote = remote
        ((_, _, piece),) = made.index.pieces()
        with Reader(folder, manifest(made.index.to_json())) as reader:
            torch.testing.assert_close(reader.tensor("table/a", slice(*rows)), tensor[slice(*rows)])
    blocks = [(piece.begin + 16, 32)] if remote else [(piece.begin + 8 * start, 16) for start in (2, 4)]
    assert folder.read_ == [(0, piece.begin), *blocks]
    assert folder.forgotten == (blocks if forgotten else [])


def test_a_damaged_header_hides_its_file_alone() -> None:
    with written({"table/a": numbers([9, 2], torch.float32)}, 40, 2, 16) as reader:
        file = Path(reader.folder.path) / "data-00000.safetensors"
        rotten = bytearray(file.read_bytes())
        rotten[9] ^= 1
        file.write_bytes(rotten)
        assert list(reader.damages()) == [Damage(file.name, "its header was changed")]
        torch.testing.assert_close(reader.tensor("table/a", slice(5, 9)), numbers([4, 2], torch.float32, 10))


@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), max_size=4))
def test_numbers_begin_at_multiples_of_eight_and_follow_without_gaps(tensors: Any) -> None:
    data = header((f"t{n}", DTYPES[name], shape) for n, (name, shape) in enumerate(tensors))
    assert len(data) % 8 == 0 and int.from_bytes(data[:8], "little") == len(data) - 8
    assert len(data) - len(data.rstrip(b" ")) < 8
    begin = 0
    for (name, shape), told in zip(tensors, json.loads(data[8:]).values(), strict=True):
        end = begin + math.prod(shape) * DTYPES[name].itemsize
        assert told == {"dtype": name, "shape": shape, "data_offsets": [begin, end]}
        begin = end


def test_numbers_that_no_file_knows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"t: cannot save numbers of torch\.complex64; use one of \['F64', 'F32'"):
        header([("t", torch.complex64, [1])])


def test_numbers_lie_at_multiples_of_their_size(tmp_path: Path) -> None:
    """Larger ones first, in a checkpoint and in what it is converted to."""
    tensors = {
        f"dense/{n}": torch.ones(3, dtype=kind) for n, kind in enumerate([torch.int8, torch.float64, torch.half])
    }
    with written(tensors, 1000, 1, 100) as reader:
        assert all(piece.begin % saved.dtype.itemsize == 0 for _, saved, piece in reader.index.pieces())
        assert tools.to_safetensors(reader, tmp_path / "all") == 3
    data = (tmp_path / "all").read_bytes()
    told = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert {name: one["data_offsets"] for name, one in told.items()} == {"1": [0, 24], "2": [24, 30], "0": [30, 33]}


def test_a_save_that_is_given_up_leaves_no_file(tmp_path: Path) -> None:
    pace, item = Throttle(), Item("dense/a", (3,), (0,), torch.ones(3))
    write(LocalFolder(tmp_path), 3, [item], pace)
    assert [file.name for file in tmp_path.iterdir()] == ["data-00003.safetensors"]
    pace.stop()
    with pytest.raises(StoppedError):
        write(LocalFolder(tmp_path), 4, [item], pace)
    assert [file.name for file in tmp_path.iterdir()] == ["data-00003.safetensors"]


def test_a_snapshot_shares_nothing_with_what_it_was_taken_of() -> None:
    item = Item("dense/a", (3, 2), (1, 0), torch.ones(2, 2))
    (copied,) = snapshot([item])
    item.tensor.zero_()
    assert (copied.key, copied.size, copied.offsets) == ("dense/a", (3, 2), (1, 0))
    torch.testing.assert_close(copied.tensor, torch.ones(2, 2))


HEADER, FILE = 16, "data-00000.safetensors"


def index_of(**told: Any) -> Index:
    """Two rows of two floats, the last bytes of their file."""
    facts: dict[str, Any] = {
        "offsets": (1, 0),
        "sizes": (1, 2),
        "file": FILE,
        "begin": HEADER + 8,
        "block_rows": 1,
        "crc32": (0,),
    }
    first = Piece((0, 0), (1, 2), FILE, HEADER, 1, (0,))
    saved = SavedTensor(torch.float32, (2, 2), (first, Piece(**{**facts, **told})))
    return Index({FILE: DataFile(HEADER + 16, HEADER, 0)}, {"table/a": saved}, version=1)


def test_an_index_is_read_as_it_was_written() -> None:
    index = index_of()
    assert Index.from_json(index.to_json()) == index == Index.joined([index])
    assert json.loads(index.to_json())["version"] == 1 and json.loads(manifest(b"").to_json())["version"] == 2
    assert Manifest.from_json(manifest(b"x").to_json()) == manifest(b"x")


@pytest.mark.parametrize(
    "told, message",
    [
        ({"begin": HEADER - 1}, "is outside its tensor or file"),
        ({"begin": HEADER + 9}, "is outside its tensor or file"),
        ({"offsets": (1, 1)}, "is outside its tensor or file"),
        ({"offsets": (2, 0)}, "is outside its tensor or file"),
        ({"offsets": (1,)}, "argument"),
        ({"offsets": (1, 0, 0), "sizes": (1, 2, 1)}, "is outside its tensor or file"),
        ({"file": "data-00001.safetensors"}, "is outside its tensor or file"),
        ({"crc32": ()}, "has 0 checksums instead of 1"),
        ({"crc32": (1, 2)}, "has 2 checksums instead of 1"),
        ({"block_rows": 0}, "has 1 checksums instead of 0"),
        ({"sizes": (1, 1)}, "have 3 of 4 numbers"),
        ({"offsets": (0, 0)}, "have 4 of 4 numbers"),
    ],
)
def test_what_cannot_be_is_no_index(told: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Index.from_json(index_of(**told).to_json())


def test_a_part_of_an_index_need_not_fill_its_tensors() -> None:
    part = index_of(sizes=(1, 1))
    assert Index.from_json(part.to_json(), whole=False) == part
    with pytest.raises(ValueError, match="have 3 of 4"):
        Index.joined([part])
    raw = json.loads(part.to_json())
    for change, message in [({"version": 2}, "the index has version 2"), ({"files": {FILE: [1, 2]}}, "Field required")]:
        with pytest.raises(ValueError, match=message):
            Index.from_json(json.dumps({**raw, **change}).encode(), whole=False)
    del raw["version"]
    with pytest.raises(ValueError, match=r"not an index: .*\(version\)"):
        Index.from_json(json.dumps(raw).encode(), whole=False)
    raw["version"] = 1
    for bad in (-1, 1.0, True, "1"):
        files = {FILE: [32, 16, bad]}
        with pytest.raises(ValueError, match=rf"not an index: .*\(files\.{FILE}\.2\)"):
            Index.from_json(json.dumps({**raw, "files": files}).encode(), whole=False)


@given(SHAPES, st.integers(1, 400))
def test_a_converted_tensor_is_read_in_runs_that_fit(shape: list[int], limit: int) -> None:
    tensor = SavedTensor(torch.float32, tuple(shape), ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tools, "PIECE_BYTES", limit)
        runs = tools._runs(tensor)
    if not shape or not shape[0]:
        assert runs == [slice(None)]
        return
    row = 4 * max(1, math.prod(shape[1:])) if math.prod(shape[1:]) else 0
    assert [n for run in runs for n in range(run.start, run.stop)] == list(range(shape[0]))
    if row:
        each = max(1, limit // row)
        assert len(runs) == -(-shape[0] // each)


def test_damage_is_shortened_in_words_only() -> None:
    damages = [Damage("f", "gone", key, rows) for key, rows in [(None, None), ("rng/00002/torch", None)]]
    damages += [Damage("g", "rotten", "table_state/a/sum", (2, 5)), Damage("h", "gone", "other")]
    assert [str(damage) for damage in damages] == [
        "f: gone",
        "f (random state of rank 00002/torch): gone",
        "g (optimizer state of table 'a/sum', rows [2, 5)): rotten",
        "h ('other'): gone",
    ]
    assert named("tensor/x") == "'x'"
    told = DamagedCheckpointError("s3://b/run/step_00000001-0001?region=x", damages)
    assert told.name == "step_00000001-0001" and told.damages == tuple(damages)
    assert str(told).endswith(f"{damages[2]}; and 1 more")
    assert str(DamagedCheckpointError("p", damages[:3])).endswith(": rotten")


def test_a_manifest_is_what_was_written_and_of_this_version() -> None:
    data = manifest(b"x").to_json()
    raw = json.loads(data)
    assert Manifest.from_json(json.dumps(raw, sort_keys=True).encode()) == manifest(b"x"), "whatever its layout"
    for changed, message in (
        ({**raw, "version": 1}, "its version is 1; this rayrec reads 2"),
        ([raw], "its version is None; this rayrec reads 2"),
        ({**raw, "step": 2}, "does not match its checksum"),
        ({name: value for name, value in raw.items() if name != "checksum"}, "does not match its checksum"),
    ):
        with pytest.raises(ValueError, match=message):
            Manifest.from_json(json.dumps(changed).encode())
    with pytest.raises(ValueError, match="it cannot be read as JSON"):
        Manifest.from_json(data[:-1])
    told = {name: value for name, value in raw.items() if name not in ("checksum", "extra")}
    checksum = sha256(json.dumps(told, sort_keys=True, separators=(",", ":")).encode())
    with pytest.raises(ValueError, match=r"its fields are wrong .*extra"):
        Manifest.from_json(json.dumps({**told, "checksum": checksum}).encode())


def test_what_is_not_json_or_lacks_a_part_is_no_index() -> None:
    raw = json.loads(index_of().to_json())
    for changed in ([], {"version": 1}, {**raw, "tensors": []}, {**raw, "tensors": {"a": {"dtype": "F32"}}}):
        with pytest.raises(ValueError, match="not an index: "):
            Index.from_json(json.dumps(changed).encode())
    for data in (b"{", b"\xff\xfe"):
        with pytest.raises(ValueError):
            Index.from_json(data)
