"""Files as other programs leave them, tried by hand: what `rayrec init` and `data inspect` say of them."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import shutil
import uuid
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayrec.cli import run
from rayrec.data import BatchStream, Cursor, DataError, Manifest, ReadOptions, Schema, convert, to_batch
from rayrec.data.stream.reading import read_window

ROWS = 200
DRAWN = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def log(last: Callable[[int], str], name: str = "at", separator: str = ",") -> str:
    """A log whose last column is made from the number of the row."""
    random = np.random.default_rng(0)
    users, items, clicks = (random.integers(0, n, ROWS) for n in (40, 60, 2))
    rows = zip(users, items, clicks, map(last, range(ROWS)), strict=True)
    return "".join(separator.join(map(str, line)) + "\n" for line in [("user", "item", "click", name), *rows])


def answer(command: str, file: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str, str]:
    """Exit status, and all that the command says on one line; what `data inspect` proposes."""
    out = ["--name", "x", "--label", "click"] if command == "init" else []
    status = run([*command.split(), str(file), *out, *more])
    captured = capsys.readouterr()
    return status, " ".join((captured.out + captured.err).split()), captured.out


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("command", ["init", "data inspect"])
@pytest.mark.parametrize("encoding", ["gbk", "shift_jis", "big5"])
def test_names_in_another_encoding_are_refused_with_the_option(
    command: str, encoding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(log(lambda n: "上中下"[n % 3], "中").encode(encoding))
    status, said, _ = answer(command, file, capsys)
    assert status == 1 and "line 1: the text is not utf-8" in said and f"file {file}" in said and "--encoding" in said
    status, said, _ = answer(command, file, capsys, "--encoding", encoding)
    assert status == 0 and "│ 中 │ string │ id │" in said


@DRAWN
@given(texts=st.lists(st.text("abcäé,;|", max_size=5), min_size=20, max_size=40), big=st.booleans())
def test_utf_16_without_a_mark_is_recognized(texts: list[str], big: bool, tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    quoted = [text.replace('"', '""') for text in texts]
    content = "user,click,word\n" + "".join(f'{n % 7},{n % 2},"{text}"\n' for n, text in enumerate(quoted))
    file.write_bytes(content.encode("utf-16-be" if big else "utf-16-le"))
    out = tmp_path / f"rows-{len(list(tmp_path.iterdir()))}"
    (done,) = convert(str(file), out)
    assert done.rows == len(texts) and f"the encoding is utf-16-{'be' if big else 'le'}" in done.note


def zipped(content: bytes) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("a.csv", content)
    return archive.getvalue()


@pytest.mark.parametrize(
    ("pack", "kind"), [(gzip.compress, "compressed with gzip"), (bz2.compress, "compressed with"), (zipped, "a zip")]
)
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.txt"])
def test_a_compressed_file_with_the_name_of_a_text_is_named(
    pack: Callable[[bytes], bytes], kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(pack(log(str).encode()))
    status, said, _ = answer("init", tmp_path / name, capsys)
    assert status == 1 and f"the file is not text but {kind}" in said and "as its name" in said


@pytest.mark.parametrize(
    ("name", "content", "kind", "fix"),
    [
        ("a.zip", zipped(b"user,click"), "a zip archive", "unpack it"),
        ("a.csv.zip", zipped(b"user,click"), "a zip archive", "unpack it"),
        ("a.tar.gz", gzip.compress(b"user,click", mtime=0), "compressed with gzip", "unpack a tar archive"),
        ("a.7z", b"7z\xbc\xaf", "a 7-Zip archive", "unpack it"),
        ("a.xls", b"\xd0\xcf\x11\xe0", "an Excel workbook", "export the table as CSV"),
        ("a.feather", b"ARROW1\x00\x00", "an Arrow or Feather file", "write it as Parquet"),
        ("a.h5", b"\x89HDF\r\n", "HDF5", "write its table as Parquet"),
        ("a.db", b"SQLite format 3\x00", "an SQLite database", "export the table"),
    ],
)
def test_a_file_of_another_kind_is_named_with_what_to_do(
    name: str, content: bytes, kind: str, fix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    for command in ("init", "data inspect"):
        status, said, _ = answer(command, tmp_path / name, capsys)
        assert status == 1 and f"it is {kind}" in said and fix in said and name in said
    schema = Schema.model_validate({"label": {"column": "click"}, "sparse": [{"name": "user"}]})
    with pytest.raises(DataError, match=f"it is {kind}"):
        Manifest.read(str(tmp_path / name), schema)


def test_columns_of_a_fixed_width_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, line in enumerate(("{:>5}{:>7}   {}", "{:05}{:07}{}")):
        file = tmp_path / f"{number}.txt"
        file.write_text("".join(line.format(n % 7, 3 * n, n % 2) + "\n" for n in range(ROWS)))
        for names in ((), ("--names", "user,item,click")):
            status, said, _ = answer("data inspect", file, capsys, *names)
            assert status == 1 and "columns of a fixed width are not read" in said
            assert "write them with a separator, e.g. pandas.read_fwf" in said
    for content in ("abc\ndef\nghi\n", "123456\n" * 9, "user\n" + "".join(f"{n:08d}\n" for n in range(9))):
        (tmp_path / "one.txt").write_text(content)
        _, said, _ = answer("data inspect", tmp_path / "one.txt", capsys)
        assert "fixed width" not in said


@pytest.mark.parametrize("zero", ["0000-00-00", "0000-00-00 00:00:00"])
def test_a_date_of_zeros_is_no_time(zero: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = "%Y-%m-%d %H:%M:%S"[: len(zero) - 2 if " " not in zero else None]
    (tmp_path / "a.csv").write_text(
        log(lambda n: zero if n % 50 == 7 else datetime.fromtimestamp(SECONDS[n], UTC).strftime(written))
    )
    status, said, _ = answer("init", tmp_path / "a.csv", capsys, "--time", "at")
    assert status == 1 and f"{zero!r} stands for no time (MySQL), in 4 of 200 rows" in said
    status, said, _ = answer("init", tmp_path / "a.csv", capsys)
    none = f"at: seems to be the time of a row, but 4 of 200 inspected rows have none, e.g. {zero!r}"
    assert status == 0 and none in said and "at │ string │ unused" in said


def test_days_of_a_spreadsheet_are_asked_for_and_divide_the_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text(log(lambda n: f"{45261 + n / 16}"))
    assert "add --time 'at=excel'" in answer("init", tmp_path / "a.csv", capsys)[1]
    (tmp_path / "x.yaml").unlink()
    shutil.rmtree(tmp_path / "x-data")
    status, said, _ = answer("init", tmp_path / "a.csv", capsys, "--time", "at=excel")
    assert status == 0 and "the last rows by 'at', from 2023-12-12" in said


@pytest.mark.parametrize("single", ["|", ";", "^"])
def test_a_doubled_separator_is_found(single: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.dat"
    file.write_text(log(lambda n: f"w{n % 9}", "word", 2 * single))
    status, said, _ = answer("init", file, capsys)
    assert status == 0 and f"4 columns separated by {2 * single!r}" in said
    text = yaml.safe_load((tmp_path / "x.yaml").read_text())["data"]["read"]["text"]
    assert text["separator"] == 2 * single


def test_empty_columns_do_not_double_a_separator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.dat"
    file.write_text(log(lambda n: f"|{n % 9}", "none|n", "|"))
    status, said, _ = answer("data inspect", file, capsys)
    assert status == 0 and "5 columns separated by '|'" in said and "none: null in all inspected rows" in said


@pytest.mark.parametrize("odd", ["inf", "-inf", "nan"])
def test_numbers_that_are_not_finite_are_left_out_by_name(
    odd: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.jsonl"
    odd = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}[odd]
    rows = (f'{{"user": {n % 7}, "click": {n % 2}, "price": {odd if n == 9 else n / 8}}}\n' for n in range(ROWS))
    file.write_text("".join(rows))
    status, said, _ = answer("init", file, capsys)
    assert status == 0 and "price: NaN or infinite in some rows: write nulls instead" in said


SECONDS = [1_700_000_000 + 4000 * n for n in range(ROWS)]


@pytest.mark.parametrize(
    "time_format",
    ["%d.%m.%Y %H:%M", "%a %b %d %H:%M:%S %Y", "%a %b %d %H:%M:%S +0000 %Y", "[%d/%b/%Y:%H:%M:%S +0000]"],
)
def test_times_as_servers_write_them_divide_the_rows(
    time_format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets do not make a list of them."""
    file = tmp_path / "a.csv"
    file.write_text(log(lambda n: datetime.fromtimestamp(SECONDS[n], UTC).strftime(time_format)))
    status, said, _ = answer("init", file, capsys)
    assert status == 0 and "evaluation: the last rows by 'at'" in said and "has lists" not in said


@pytest.mark.parametrize("unit", [1, 1000])
@pytest.mark.parametrize("command", ["init", "data inspect"])
def test_a_time_with_nulls_is_no_number(
    command: str, unit: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.csv"
    file.write_text(log(lambda n: "" if n % 20 == 3 else str(unit * SECONDS[n])))
    status, said, _ = answer(command, file, capsys)
    assert status == 0 and "at: a time, null in" in said
    if command == "init":
        assert f"remove these rows and add --time 'at={'s' if unit == 1 else 'ms'}'" in said
        assert "at" not in str(yaml.safe_load((tmp_path / "x.yaml").read_text())["schema"]["dense"])
    status, said, _ = answer("data inspect", file, capsys, "--time", "at")
    assert status == 1 and "the time is null in 10 of 200 rows" in said


@pytest.mark.parametrize(
    ("last", "note"),
    [
        (lambda n: f"{n % 50}.5%", "numbers with a unit, as in '0.5%', are texts"),
        (lambda n: f"€{n % 50}.5", "numbers with a unit, as in '€0.5', are texts"),
        (lambda n: "n/k" if n % 8 == 0 else f"{n}.5", "175 of 200 are numbers; the others: 'n/k'"),
    ],
)
def test_numbers_that_are_read_as_texts_are_told(
    last: Callable[[int], str], note: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text(log(last, "price"))
    status, said, _ = answer("init", tmp_path / "a.csv", capsys)
    assert status == 0 and f"'price': {note}" in said


def test_inspect_reads_numbers_as_init_does_and_says_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text(log(lambda n: f"{n},{n % 10}", "price", ";"))
    status, said, out = answer("data inspect", tmp_path / "a.csv", capsys)
    assert status == 0 and "numbers have ',' as the decimal point: price" in said and "│ price │ double │ dense" in said
    proposal: dict[str, Any] = yaml.safe_load(out)
    assert proposal["data"]["read"]["text"] == {"separator": ";", "decimal": ","}
    assert [feature["name"] for feature in proposal["schema"]["dense"]] == ["price"]


@pytest.mark.parametrize(
    "content", [{"data": [{"user": 1, "click": 0}] * 9}, {"user": [1] * 9, "click": [0, 1, 0] * 3}]
)
def test_one_object_with_all_rows_is_refused_with_the_form(
    content: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(content))
    for command in ("init", "data inspect"):
        status, said, _ = answer(command, tmp_path / "a.json", capsys)
        assert status == 1 and "JSON has one object per line, or one array of objects" in said


def test_a_file_of_names_alone_has_no_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text("user,item,click\n")
    for command in ("init", "data inspect"):
        status, said, _ = answer(command, tmp_path / "a.csv", capsys)
        assert status == 1 and "has no rows" in said


def test_an_unknown_label_is_refused_with_the_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text(log(str))
    status, said, _ = answer("data inspect", tmp_path / "a.csv", capsys, "--label", "zzz")
    assert status == 1 and "there is no column 'zzz'; the columns are user, item, click, at" in said


def id_columns(rows: int = ROWS) -> dict[str, tuple[pa.Array, pa.Array]]:
    """Columns of ids as databases export them, and the plain column that is the same."""
    random = np.random.default_rng(1)
    users = [uuid.UUID(int=int(n) << 64) for n in random.integers(1, 30, rows)]
    numbers = random.integers(1, 30, rows)
    nulls = numbers == 7
    stored = pa.array([None if null else user.bytes for user, null in zip(users, nulls, strict=True)], pa.binary(16))
    return {
        "uuid": (
            pa.ExtensionArray.from_storage(pa.uuid(), stored),
            pa.array([None if null else str(user) for user, null in zip(users, nulls, strict=True)]),
        ),
        "fixed": (stored, stored.cast(pa.binary())),
        "decimal": (pa.array(numbers, mask=nulls).cast(pa.decimal128(38, 0)), pa.array(numbers, mask=nulls)),
    }


def test_ids_as_databases_export_them_are_those_of_plain_columns(tmp_path: Path) -> None:
    """Read, mapped, and as a table in memory."""
    columns = id_columns()
    features = [{"name": name, "mapping": {"kind": "hash"}, "on_null": "empty"} for name in columns]
    schema = Schema.model_validate({"label": {"column": "click"}, "sparse": features})
    clicks = pa.array(np.arange(ROWS) % 2)
    batches = []
    for which in (0, 1):
        table = pa.table({name: pair[which] for name, pair in columns.items()} | {"click": clicks})
        pq.write_table(table, tmp_path / f"{which}.parquet", row_group_size=64)
        batches.append(to_batch(table, schema, dict.fromkeys(columns, 1000)))
        manifest = Manifest.read(str(tmp_path / f"{which}.parquet"), schema)
        options = ReadOptions(reader="local")
        order = {"batch_rows": ROWS, "rank": 0, "world_size": 1, "cursor": Cursor.start(0), "seed": 0, "shuffle": True}
        with BatchStream(manifest, schema, dict.fromkeys(columns, 1000), options=options, **order) as stream:
            batches += [batch for batch, _ in stream]
    in_memory, from_file, in_memory_plain, from_file_plain = (batch.sparse for batch in batches)
    assert torch.equal(in_memory.values(), in_memory_plain.values())
    assert torch.equal(from_file.values(), from_file_plain.values())
    assert torch.equal(from_file.lengths(), from_file_plain.lengths())


@pytest.mark.parametrize("name", ["uuid", "fixed", "decimal"])
def test_init_proposes_them_as_ids_and_counts_a_vocabulary(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    column, plain = id_columns()[name]
    table = pa.table({"user_id": column, "click": np.arange(ROWS) % 2})
    pq.write_table(table, tmp_path / "a.parquet")
    status, _, out = answer("data inspect", tmp_path / "a.parquet", capsys)
    (feature,) = yaml.safe_load(out)["schema"]["sparse"]
    assert status == 0 and (feature["name"], feature["kind"]) == ("user_id", "id")
    if name == "uuid":
        counted = tmp_path / "ids.parquet"
        assert (
            run(["data", "vocabulary", str(tmp_path / "a.parquet"), "--column", "user_id", "--out", str(counted)]) == 0
        )
        assert set(pq.read_table(counted)["id"].to_pylist()) == set(plain.drop_null().to_pylist())


def test_a_decimal_beyond_64_bits_is_named(tmp_path: Path) -> None:
    schema = Schema.model_validate(
        {"label": {"column": "click"}, "sparse": [{"name": "a", "mapping": {"kind": "hash"}}]}
    )
    table = pa.table({"a": pa.array([Decimal(10**20), Decimal(1)], pa.decimal128(38, 0)), "click": [0, 1]})
    pq.write_table(table, tmp_path / "a.parquet")
    _, problems = read_window(Manifest.read(str(tmp_path), schema), 0)
    assert problems and "a.parquet" in str(problems.error(0)) and "out of bounds" in str(problems.error(0))


def test_filters_on_a_uuid_compare_its_text(tmp_path: Path) -> None:
    column, plain = id_columns()["uuid"]
    pq.write_table(
        pa.table({"u": column, "row": np.arange(ROWS), "click": np.arange(ROWS) % 2}),
        tmp_path / "a.parquet",
        row_group_size=20,
    )
    wanted = plain[3].as_py()
    schema = Schema.model_validate(
        {"label": {"column": "click"}, "sparse": [{"name": "row", "mapping": {"kind": "hash"}}]}
    )
    for condition in (["u", "=", wanted], ["u", "<=", wanted]):
        manifest = Manifest.read(str(tmp_path), schema, filters=[condition], window_rows=1000)
        rows, _ = read_window(manifest, 0)
        texts = [text for text in plain.to_pylist() if text is not None]
        assert len(rows) == sum(text == wanted if condition[1] == "=" else text <= wanted for text in texts) > 0


UUIDS = [uuid.UUID(int=5), uuid.UUID(int=6 << 64)]
NOON = datetime(2024, 1, 2, 12)
AVRO: dict[str, tuple[Any, list[Any], pa.DataType, list[Any]]] = {
    "uuid": ({"type": "string", "logicalType": "uuid"}, UUIDS, pa.string(), [str(one) for one in UUIDS]),
    "fixed uuid": (
        {"type": "fixed", "name": "U", "size": 16, "logicalType": "uuid"},
        [one.bytes for one in UUIDS],
        pa.uuid(),
        UUIDS,
    ),
    "uuids in a record": (
        {"type": "array", "items": {"type": "string", "logicalType": "uuid"}},
        [UUIDS[:1], []],
        pa.list_(pa.string()),
        [[str(UUIDS[0])], []],
    ),
    "local time": (
        {"type": "long", "logicalType": "local-timestamp-micros"},
        [NOON, NOON],
        pa.timestamp("us"),
        [NOON] * 2,
    ),
    "nanoseconds": (
        ["null", {"type": "long", "logicalType": "timestamp-nanos"}],
        [1_704_196_800 * 10**9, None],
        pa.timestamp("ns", "UTC"),
        [NOON.replace(tzinfo=UTC), None],
    ),
    "time of day": (
        {"type": "int", "logicalType": "time-millis"},
        [NOON.time()] * 2,
        pa.time32("ms"),
        [NOON.time()] * 2,
    ),
    "wide decimal": (
        {"type": "bytes", "logicalType": "decimal", "precision": 50, "scale": 2},
        [Decimal("1.25"), Decimal(10**40)],
        pa.decimal256(50, 2),
        [Decimal("1.25"), Decimal(10**40)],
    ),
    "map": (
        {"type": "map", "values": "double"},
        [{"a": 0.5}, {}],
        pa.map_(pa.string(), pa.float64()),
        [[("a", 0.5)], []],
    ),
    "enum": ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, ["B", "A"], pa.string(), ["B", "A"]),
    "int or double": (["null", "int", "double"], [5, 0.5], pa.float64(), [5.0, 0.5]),
    "unknown meaning": ({"type": "long", "logicalType": "adjusted"}, [7, 8], pa.int64(), [7, 8]),
}


@pytest.mark.parametrize("name", AVRO)
def test_avro_types_are_read_as_what_they_mean(name: str, tmp_path: Path) -> None:
    fastavro = pytest.importorskip("fastavro")
    kind, values, arrow, expected = AVRO[name]
    record = {"type": "record", "name": "row", "fields": [{"name": "x", "type": kind}]}
    with (tmp_path / "a.avro").open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(record), [{"x": value} for value in values])
    (done,) = convert(str(tmp_path / "a.avro"), tmp_path / "out")
    column = pq.read_table(done.files[0])["x"]
    assert (column.type, column.to_pylist()) == (arrow, expected)


@pytest.mark.parametrize(
    "kind",
    [["null", "string", "long"], {"type": "record", "name": "N", "fields": [{"name": "next", "type": ["null", "N"]}]}],
    ids=["text or number", "record in itself"],
)
def test_avro_types_without_a_column_are_refused_by_name(kind: Any, tmp_path: Path) -> None:
    fastavro = pytest.importorskip("fastavro")
    record = {"type": "record", "name": "row", "fields": [{"name": "x", "type": kind}]}
    with (tmp_path / "a.avro").open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(record), [])
    with pytest.raises(DataError, match=r"unsupported Avro type .*column 'x'"):
        list(convert(str(tmp_path / "a.avro"), tmp_path / "out"))


def test_bytes_that_are_no_text_are_ids_of_a_proposal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [bytes([255, 254, 65 + n % 5]) for n in range(ROWS)]
    pq.write_table(pa.table({"code": words, "user": np.arange(ROWS) % 7, "click": np.arange(ROWS) % 2}), "a.parquet")
    status, said, _ = answer("init", tmp_path / "a.parquet", capsys)
    assert status == 0 and "│ code │ binary │ id │" in said
    assert run(["data", "check", "x.yaml"]) == 0
    capsys.readouterr()


def test_a_proposal_for_types_of_avro_passes_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lists with nulls in them too, which the feature leaves out."""
    fastavro = pytest.importorskip("fastavro")
    kinds = {
        "click": "int",
        "user": {"type": "string", "logicalType": "uuid"},
        "item": ["null", {"type": "enum", "name": "Item", "symbols": [*"ABCDEF"]}],
        "at": {"type": "long", "logicalType": "local-timestamp-millis"},
        "price": {"type": "bytes", "logicalType": "decimal", "precision": 50, "scale": 2},
        "tags": {"type": "array", "items": ["null", "long"]},
        "scores": {"type": "map", "values": "double"},
    }
    rows = [
        {
            "click": n % 2, "user": uuid.UUID(int=n % 30), "item": None if n % 9 == 0 else "ABCDEF"[n % 6],
            "at": NOON + timedelta(hours=n), "price": Decimal(n % 60) / 4, "tags": [n % 5, None] if n % 3 else [],
            "scores": {"a": 0.5},
        }
        for n in range(3 * ROWS)
    ]  # fmt: skip
    record = {"type": "record", "name": "row", "fields": [{"name": name, "type": kinds[name]} for name in kinds]}
    with (tmp_path / "a.avro").open("wb") as file:
        fastavro.writer(file, fastavro.parse_schema(record), rows)
    status, said, _ = answer("init", tmp_path / "a.avro", capsys)
    assert status == 0 and "the last rows by 'at'" in said and "│ tags │ list<element: int64> │ id_list │ 400 │" in said
    assert "scores: map<string, double" in said
    schema = yaml.safe_load((tmp_path / "x.yaml").read_text())["schema"]
    assert {feature["name"]: feature.get("on_null") for feature in schema["sparse"]} == {
        "user": None, "item": "empty", "tags": "empty",
    }  # fmt: skip
    assert run(["data", "check", "x.yaml"]) == 0
    assert "540 rows, 0 bad" in capsys.readouterr().out


def test_what_init_proposes_for_odd_columns_of_parquet_passes_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other under the same name: no vocabulary of an earlier one is used."""
    null = [n % 7 == 0 for n in range(ROWS)]
    weighted = pa.list_(pa.struct([("id", pa.int64()), ("weight", pa.float64())]))
    columns: dict[str, tuple[pa.Array, str]] = {
        "dictionary with nulls": (
            pa.array(["abcdef"[n % 6] for n in range(ROWS)], mask=np.array(null)).dictionary_encode(), "id",
        ),
        "lists with nulls": (pa.array([[n % 9, None] if n % 3 else [] for n in range(ROWS)]), "id_list"),
        "null pairs": (
            pa.array([[{"id": n % 9, "weight": 0.5}, None] for n in range(ROWS)], weighted), "weighted_id_list",
        ),
        "null weights": (pa.array([[{"id": n % 9, "weight": None}] for n in range(ROWS)], weighted), "unused"),
        "texts": (pa.array(["" if n % 7 == 0 else ["a\0b", "a\nb", "😀", "é"][n % 4] for n in range(ROWS)]), "id"),
    }  # fmt: skip
    for name, (column, role) in columns.items():
        (tmp_path / "x.yaml").unlink(missing_ok=True)
        shutil.rmtree(tmp_path / "x-data", ignore_errors=True)
        users = pa.array(np.arange(ROWS) % 11)
        pq.write_table(pa.table({"click": np.arange(ROWS) % 2, "user": users, "x": column}), tmp_path / "a.parquet")
        status, said, _ = answer("init", tmp_path / "a.parquet", capsys)
        assert status == 0 and f" │ {role} │" in said.partition("│ x │")[2], (name, said)
        status = run(["data", "check", "x.yaml"])
        checked = capsys.readouterr().out
        assert status == 0 and " 0 bad" in checked, (name, checked)
        if role == "id":  # distinct ids have a row each
            ids = next(line.split("│") for line in checked.splitlines() if line.startswith("│ x "))
            assert int(ids[4]) == int(ids[6]), (name, checked)
