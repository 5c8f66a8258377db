"""Lookups of many ids: equal to a dict, in memory and in files that a node's processes share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.data import DataError, load_vocabulary
from rayrec.data.mapping import id_index, vocabulary
from tests.data.test_vocabulary import feature, ids_of

TOP = (1 << 64) - 1
HASHES = st.one_of(st.integers(0, TOP), st.integers(0, 40), st.integers(TOP - 40, TOP))


def written(hashes: list[int], folder: Path) -> id_index.IdIndex:
    folder.mkdir()
    whole = np.array(hashes, np.uint64)
    id_index.IdIndex.make(iter([whole[:7], whole[7:]]), len(hashes), False, folder / "index")
    return id_index.IdIndex.open(folder / "index")


@settings(max_examples=60)
@given(st.lists(HASHES, unique=True, max_size=120), st.lists(HASHES, max_size=60), st.sampled_from([1, 3, 50]))
def test_an_index_is_a_dict(
    tmp_path_factory: pytest.TempPathFactory, kept: list[int], asked: list[int], part: int
) -> None:
    """With hashes that crowd into the first and last cells, among them the number of an empty one."""
    oracle = {one: place for place, one in enumerate(kept)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(id_index, "_PART_IDS", part)
        patch.setattr(id_index, "_BLOCK", 16)
        query = np.array([*asked, *kept], np.uint64)
        wanted = [oracle.get(one, -1) for one in [*asked, *kept]]
        whole = np.array(kept, np.uint64)
        assert id_index.IdIndex.of(whole, False).find_hashes(query).tolist() == wanted
        assert written(kept, tmp_path_factory.mktemp("x") / "index").find_hashes(query).tolist() == wanted


def test_an_id_that_is_there_twice_is_told_with_both_places(tmp_path: Path) -> None:
    hashes = [5, 9, 1 << 63, 77, 8, 2, 1, 4, 9, 6]
    for make in (
        lambda: id_index.IdIndex.of(np.array(hashes, np.uint64), False),
        lambda: written(hashes, tmp_path / "index"),
    ):
        with pytest.raises(id_index.DuplicateHash) as caught:
            make()
        assert caught.value.positions == (1, 8)


READER = """
import sys
import numpy as np, pyarrow as pa
from rayrec.data import load_vocabulary
import rayrec.data.mapping.vocabulary as vocabulary
vocabulary._IN_MEMORY = 100
ids = pa.array([f"id {7 * k}" for k in range(0, 6000, 11)]) if sys.argv[2] == "text" else np.arange(0, 42000, 77)
print(load_vocabulary(sys.argv[1]).find(ids).tolist(), flush=True)
pages, kept = {}, None
for line in open("/proc/self/smaps"):
    if "/vocabularies/" in line:
        kept = line.split()[-1].rsplit("/", 2)[-2:]
        pages.setdefault("/".join(kept), line.split()[4])
    elif kept and line.startswith("Anonymous"):  # pages of this process alone
        assert line.split()[1] == "0", line
    elif line.startswith("VmFlags"):
        kept = None
print(sorted(pages.items()), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("text", [False, True])
def test_processes_of_a_node_share_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bool) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    numbers = (7 * rng.permutation(5000)).tolist()
    ids = [f"id {number}" for number in numbers] if text else numbers
    path = tmp_path / "v.parquet"
    pq.write_table(pa.table({"id": ids}), path)
    place = {number: at for at, number in enumerate(numbers)}
    wanted = [place.get(number, -1) for number in range(0, 42000, 77)]
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, str(path), "text" if text else "number"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        found = [[reader.stdout.readline() for _ in range(2)] for reader in readers]
    finally:
        for reader in readers:
            reader.communicate()
    assert found[0] == found[1]
    assert found[0][0] == f"{wanted}\n"
    (link,) = (tmp_path / "cache" / "rayrec" / "vocabularies").glob("*-*")
    folder = link.resolve()
    inode = (f"{folder.name}/index", str((folder / "index").stat().st_ino))
    assert found[0][1] == f"{[inode]}\n"


def test_files_of_an_index_follow_their_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index_above: Callable[[int], None]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("RAYREC_VOCABULARY_BYTES", "0")
    index_above(3)
    path = tmp_path / "v.parquet"
    texts = ["", "b", "ü", "a rather long id of many words", "e"]
    for ids, unknown in ((texts, "c"), (texts[::-1], "c"), ([3, -1, 1 << 40, 0], 5)):
        vocabulary.close_vocabularies()
        path.unlink(missing_ok=True)
        pq.write_table(pa.table({"id": ids}), path)
        assert ids_of(pa.array([*ids, None]), feature(path, on_null="empty")) == list(range(2, 2 + len(ids)))
        assert ids_of(pa.array(ids).dictionary_encode(), feature(path)) == list(range(2, 2 + len(ids)))
        assert ids_of(pa.array([unknown]), feature(path))[0] in (0, 1)
        with pytest.raises(DataError, match="not in its vocabulary"):
            ids_of(pa.array([ids[0], unknown]), feature(path, oov_rows=0))
        assert len([*(tmp_path / "cache" / "rayrec" / "vocabularies").glob("*-*")]) == 1
    vocabulary.close_vocabularies()
    pq.write_table(pa.table({"id": [1, 2, 3, 1]}), path)
    with pytest.raises(DataError, match="twice") as caught:
        load_vocabulary(str(path))
    assert caught.value.value == "1"
    assert [one.suffix for one in (tmp_path / "cache" / "rayrec" / "vocabularies").iterdir() if one.is_file()]


def indexes_in(cache: Path) -> set[str]:
    return {one.name for one in cache.iterdir() if one.is_dir() and not one.is_symlink()}


def links_in(cache: Path) -> list[str]:
    return [one.resolve(strict=True).name for one in cache.iterdir() if one.is_symlink()]


HOLDER = """
import sys
import numpy as np
import rayrec.data.mapping.vocabulary as vocabulary
vocabulary._IN_MEMORY = 100
lookup = vocabulary.load_vocabulary(sys.argv[1])
print("open", flush=True)
sys.stdin.readline()
print(lookup.find(np.arange(3)).tolist(), flush=True)
"""


def test_the_cache_has_a_limit_and_what_is_in_use_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index_above: Callable[[int], None]
) -> None:
    """The least recently opened ones go, of the test's process too, once it has given them back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    index_above(100)
    cache, paths = tmp_path / "rayrec" / "vocabularies", [tmp_path / f"{number}.parquet" for number in range(6)]
    for number, path in enumerate(paths):
        pq.write_table(pa.table({"id": range(number, 1000 + number)}), path)

    def opened(number: int) -> str:
        vocabulary.close_vocabularies()
        assert load_vocabulary(str(paths[number])).find(np.arange(number, number + 3)).tolist() == [0, 1, 2]
        return max((cache / name for name in indexes_in(cache)), key=lambda one: one.stat().st_mtime_ns).name

    holder = [sys.executable, "-c", HOLDER, str(paths[0])]
    with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "open\n"
        (held,) = indexes_in(cache)
        each = sum(file.stat().st_size for file in (cache / held).iterdir())
        monkeypatch.setenv("RAYREC_VOCABULARY_BYTES", str(3 * each + 100))
        one, two = opened(1), opened(2)
        assert indexes_in(cache) == {held, one, two} and opened(1) == one
        three = opened(3)
        assert indexes_in(cache) == {held, one, three}, "two was opened before one, and another process has the first"
        mine = load_vocabulary(str(paths[3]))
        monkeypatch.setenv("RAYREC_VOCABULARY_BYTES", "1")
        four = opened(4)
        assert indexes_in(cache) == {held, three, four} == set(links_in(cache)), "whatever the limit"
        assert mine.find(np.arange(3, 6)).tolist() == [0, 1, 2]
        del mine
        assert other.communicate("\n")[0] == "[0, 1, 2]\n"
    five = opened(5)
    assert indexes_in(cache) == {five} and links_in(cache) == [five], "all that are not in use any more"
    monkeypatch.setenv("RAYREC_VOCABULARY_BYTES", "20 GB")
    with pytest.raises(DataError, match="RAYREC_VOCABULARY_BYTES=20 GB must be a number of bytes"):
        opened(0)


@pytest.mark.parametrize("text", [False, True])
def test_copies_of_a_vocabulary_share_an_index_and_others_of_alike_footers_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index_above: Callable[[int], None], text: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    index_above(3)
    cache = tmp_path / "rayrec" / "vocabularies"
    (cache / "making").mkdir(parents=True)
    (cache / "making" / "index").write_bytes(b"what a kill left")
    for name, places in (("a", [0, 1, 2, 3]), ("b", [0, 1, 2, 3]), ("c", [0, 2, 1, 3])):
        ids = [f"id {place}" if text else place for place in places]
        kind = pa.string() if text else pa.int64()
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"id": pa.array(ids, kind)}), path, compression="none", use_dictionary=False)
        found = load_vocabulary(str(path)).find(pa.array(sorted(ids)) if text else np.arange(4)).tolist()
        assert found == [places.index(place) for place in range(4)]
    assert (tmp_path / "a.parquet").stat().st_size == (tmp_path / "c.parquet").stat().st_size
    links = links_in(cache)
    assert len(indexes_in(cache)) == 2 == len(set(links)) and len(links) == 3


def test_the_cache_lies_where_its_user_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index_above: Callable[[int], None]
) -> None:
    index_above(3)
    (file := tmp_path / "file").touch()
    temporary = tmp_path / "tmp" / f"rayrec-{os.getuid()}"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    for variable, cache in (
        (tmp_path / "cache", tmp_path / "cache" / "rayrec"),
        (tmp_path / "cache", tmp_path / "cache" / "rayrec"),  # it may be there
        (None, tmp_path / "home" / ".cache" / "rayrec"),
        (file, temporary),
        (file, temporary),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", str(variable)) if variable else monkeypatch.delenv("XDG_CACHE_HOME")
        path = tmp_path / "ids.parquet"
        pq.write_table(pa.table({"id": range(4)}), path)
        vocabulary.close_vocabularies()
        assert load_vocabulary(str(path)).find(np.arange(4)).tolist() == [0, 1, 2, 3]
        assert indexes_in(cache / "vocabularies")
    assert (temporary / "vocabularies").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("ids", [[], [7], list(range(0, 9000, 3)), [""], [f"id {n}" for n in range(3000)]])
def test_the_index_beside_an_exports_vocabulary_is_used_and_nothing_is_kept_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index_above: Callable[[int], None], ids: list[int] | list[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, copy = tmp_path / "v.parquet", tmp_path / "export" / "0.parquet"
    copy.parent.mkdir()
    kind = pa.string() if ids and isinstance(ids[0], str) else pa.int64()
    for place in (path, copy):
        pq.write_table(pa.table({"id": pa.array(ids, kind)}), place)
    made = load_vocabulary(str(path))
    made.write(copy.with_name("0.parquet.index"))
    index_above(0)
    found = load_vocabulary(str(copy))
    assert (found.text, found.size) == (made.text, len(ids))
    asked = pa.array([*ids, *(["x"] if found.text else [-5])], kind)
    query = asked if found.text else asked.to_numpy()
    assert found.find(query).tolist() == [*range(len(ids)), -1] and isinstance(found.hashes.base, np.memmap)
    assert not (tmp_path / "cache").exists()
