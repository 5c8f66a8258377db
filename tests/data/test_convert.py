"""CSV, JSON lines and Avro to Parquet: values, types, places of errors, and what training says of such files."""

from __future__ import annotations

import bz2
import gzip
import json
import tracemalloc
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.orc as paorc
import pyarrow.parquet as pq
import pytest

from rayrec.cli import run
from rayrec.data import DataError, Layout, Manifest, Schema, TextOptions, convert
from rayrec.data.formats.parquet_writer import write_parts

ROWS = [
    {"label": n % 2, "user": f"u{n}", "age": None if n % 5 == 0 else n / 2, "items": list(range(n % 4))}
    for n in range(250)
]


def csv(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    def cell(value: Any) -> str:
        return "" if value is None else str(value)

    lines = [delimiter.join(("label", "user", "age"))]
    lines += [delimiter.join(cell(row[name]) for name in ("label", "user", "age")) for row in rows]
    return ("\n".join(lines) + "\n").encode()


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def avro(rows: list[dict[str, Any]], path: Path) -> Path:
    fields = [
        {"name": "label", "type": "int"},
        {"name": "user", "type": "string"},
        {"name": "age", "type": ["null", "double"]},
        {"name": "items", "type": {"type": "array", "items": "long"}},
    ]
    schema = {"type": "record", "name": "row", "fields": fields}
    with open(path, "wb") as file:
        fastavro.writer(file, fastavro.parse_schema(schema), rows)
    return path


def read(folder: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(folder.rglob("*.parquet")) for row in pq.ParquetFile(file).read().to_pylist()]


@pytest.mark.parametrize("name", ["x.csv", "x.tsv", "x.csv.gz", "x.jsonl", "x.ndjson.bz2", "x.avro"])
def test_every_value_arrives(tmp_path: Path, name: str) -> None:
    (tmp_path / "out").mkdir()  # it may be there, empty
    source, lists = tmp_path / name, "sv" not in name
    if name.endswith("avro"):
        avro(ROWS, source)
    else:
        text = jsonl(ROWS) if lists else csv(ROWS, "\t" if "tsv" in name else ",")
        source.write_bytes(gzip.compress(text) if ".gz" in name else bz2.compress(text) if ".bz2" in name else text)
    [done] = convert(str(source), tmp_path / "out", layout=Layout(rows_per_file=100, row_group_rows=30))
    assert (done.rows, [f.name for f in done.files]) == (250, [f"x-0000{n}.parquet" for n in range(3)])
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [f.name for f in done.files]
    assert read(tmp_path / "out") == [row if lists else {k: row[k] for k in ("label", "user", "age")} for row in ROWS]
    assert [pq.ParquetFile(f).metadata.num_row_groups for f in done.files] == [4, 4, 2]


def test_files_agree_on_types_and_partitions_stay(tmp_path: Path, running_ray: None) -> None:
    for day, rows in ((1, ROWS[:3]), (2, ROWS[3:7])):
        below = tmp_path / "in" / f"day={day}"
        below.mkdir(parents=True)
        whole = [{**row, "age": int(row["age"] or 0)} if day == 1 else row for row in rows]
        (below / "x.csv").write_bytes(csv(whole))
    (tmp_path / "in" / "day=1" / "_SUCCESS").write_text("")
    done = list(convert(str(tmp_path / "in"), tmp_path / "out", on_ray=True))
    assert [d.rows for d in done] == [3, 4]
    schema = Schema.model_validate({"dense": [{"name": "age", "default": 0}], "sparse": [{"name": "day"}]})
    manifest = Manifest.read(str(tmp_path / "out"), schema, filters=[("day", "=", 2)])
    assert manifest.rows == 4 and dict(manifest.columns)["age"] == pa.float64()


LONG = b"1," + b"u" * 1000 + b",0.5\n"
LONG_JSON = b'{"label": 1, "user": "' + b"u" * 1000 + b'"}\n'


@pytest.mark.parametrize(
    ("name", "text", "line", "message"),
    [
        ("x.csv", csv(ROWS).replace(b"u7,", b"u7,9,"), 9, "Expected 3 columns, got 4"),
        ("x.csv", csv([]) + LONG * 10_000 + b"x,u,1\n", 10_002, "line 10002: .*invalid value 'x'"),
        ("x.csv", b"", None, "the file has no rows"),
        (
            "x.jsonl",
            jsonl(ROWS).replace(b'{"label": 1, "user": "u7"', b'{"label": 1, "user": 7'),
            8,
            "string to number",
        ),
        ("x.jsonl", jsonl(ROWS) + b'\n{"label": 1\n', 252, "line 252: JSON parse error"),
        ("x.jsonl", LONG_JSON * 10_000 + b'{"colour": "red"}\n', 10_001, "line 10001: .*unexpected field"),
        ("x.jsonl", b"", None, "the file is empty"),
        ("x.avro", b"no avro", None, "cannot read the file as Avro"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, name: str, text: bytes, line: int | None, message: str) -> None:
    """Also beyond the first 8 MB, which are read at once."""
    (tmp_path / name).write_bytes(text)
    with pytest.raises(DataError, match=message) as caught:
        list(convert(str(tmp_path / name), tmp_path / "out"))
    assert (caught.value.file, caught.value.row) == (str(tmp_path / name), line) and caught.value.fix
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_a_cut_avro_file_is_named(tmp_path: Path) -> None:
    file = avro(ROWS * 100, tmp_path / "x.avro")
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(DataError, match="cannot read rows") as caught:
        list(convert(str(file), tmp_path / "out"))
    assert caught.value.file == str(file)


def test_types_can_be_given(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user,n\n1,1\n2,2\n")
    (tmp_path / "b.csv").write_text("user,n\nx,3.5\n")
    with pytest.raises(DataError, match=r"string here, int64 in .*a\.csv.*--type user=string"):
        list(convert(str(tmp_path), tmp_path / "out"))
    list(convert(str(tmp_path), tmp_path / "out", text=TextOptions(types={"user": "string"})))
    assert [r["user"] for r in read(tmp_path / "out")] == ["1", "2", "x"]
    assert [r["n"] for r in read(tmp_path / "out")] == [1.0, 2.0, 3.5]
    with pytest.raises(DataError, match="already contains Parquet files"):
        list(convert(str(tmp_path / "a.csv"), tmp_path / "out"))
    with pytest.raises(ValueError, match="unknown type 'text'"):
        TextOptions(types={"user": "text"})
    assert TextOptions(types={"user": "list<int64>"}).types
    for wrong in ("list<int64", "int64>", "list<>"):
        with pytest.raises(ValueError, match="unknown type"):
            TextOptions(types={"user": wrong})
    (tmp_path / "a.jsonl").write_text('{"user": "x", "n": 1}\n')
    with pytest.raises(DataError, match="would overwrite"):
        text = TextOptions(types={"user": "string"})
        list(convert([str(tmp_path / "a.csv"), str(tmp_path / "a.jsonl")], tmp_path / "new", text=text))


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    batch = pa.RecordBatch.from_pydict({"x": list(range(10_000))})
    before, most = pa.total_allocated_bytes(), 0

    def batches():  # type: ignore[no-untyped-def]
        nonlocal most
        for _ in range(200):
            most = max(most, pa.total_allocated_bytes() - before)
            yield pa.RecordBatch.from_arrays([pa.array(batch.column(0).to_numpy() + 1)], ["x"])

    tracemalloc.start()
    files = write_parts(batches(), tmp_path, "x", Layout(rows_per_file=900_000, row_group_rows=50_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [pq.ParquetFile(f).metadata.num_rows for f in files] == [900_000, 900_000, 200_000]
    assert most < 4 << 20 and peak < 4 << 20, "all rows are 16 MB"


def test_a_folder_without_data_says_what_it_has(tmp_path: Path) -> None:
    schema = Schema.model_validate({"sparse": [{"name": "x"}]})
    with pytest.raises(DataError, match="the folder is empty"):
        Manifest.read(str(tmp_path), schema)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("x")
    contents = r"holds no Parquet file \(\*.parquet\); it has [ab].txt and 1 more"
    with pytest.raises(DataError, match=rf"{contents} .* fix: name the files that hold the rows, e.g. .*/[ab].txt"):
        Manifest.read(str(tmp_path), schema)
    with pytest.raises(DataError, match=r"no file that can be read \(\*.csv, \*.tsv, .*\); it has [ab].txt and 1 more"):
        list(convert(str(tmp_path), tmp_path / "out"))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.csv").write_bytes(csv(ROWS))
    paths = [str(tmp_path / "x.csv"), str(tmp_path / "out")]
    assert run(["data", "convert", *paths, "--type", "user=string"]) == 0
    assert "250 rows in 1 Parquet files" in capsys.readouterr().out.replace("\n", " ")
    assert run(["data", "convert", "x.csv", "out", "--type", "user"]) == 2


def test_orc_becomes_the_same_rows(tmp_path: Path) -> None:
    rows = pa.table({"user": [1, None, 3], "tags": [["a"], [], None], "x": [0.5, 1.5, 2.5], "at": ["p", "q", "r"]})
    (tmp_path / "in").mkdir()
    paorc.write_table(rows, tmp_path / "in" / "a.orc")
    paorc.write_table(rows.drop_columns("at"), tmp_path / "in" / "b.orc")
    assert [done.rows for done in convert(str(tmp_path / "in"), tmp_path / "out")] == [3, 3]
    assert pq.read_table(tmp_path / "out" / "a-00000.parquet").to_pylist() == rows.to_pylist()
    wanted = [row | {"at": None} for row in rows.to_pylist()]
    assert pq.read_table(tmp_path / "out" / "b-00000.parquet").to_pylist() == wanted
    (tmp_path / "bad.orc").write_bytes(b"ORC?")
    with pytest.raises(DataError, match="cannot read the file as ORC"):
        list(convert(str(tmp_path / "bad.orc"), tmp_path / "other"))


@pytest.mark.parametrize(("text", "line"), [('{"a": 1}\n\n{"a": x}\n', 3), ('{"a": x}\n{"a": y}\n', 1)])
def test_the_first_wrong_line_of_json_is_named(tmp_path: Path, text: str, line: int) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(DataError, match=f"line {line}: ") as caught:
        list(convert(str(tmp_path / "x.jsonl"), tmp_path / "out"))
    assert (caught.value.file, caught.value.row) == (str(tmp_path / "x.jsonl"), line)


def test_empty_cells_of_texts_are_nulls(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("name,n\na,1\n,2\nNULL,\n\\N,4\nNA,5\n")
    list(convert(str(tmp_path / "x.csv"), tmp_path / "out"))
    assert [tuple(row.values()) for row in read(tmp_path / "out")] == [
        ("a", 1), (None, 2), (None, None), (None, 4), ("NA", 5),
    ]  # fmt: skip


CENSUS = b"38, Private, 6, - 50000.\n44, NULL, 37, 50000+.\n2, Not in universe, , - 50000.\n"


def test_a_file_without_a_header_gets_names_and_loses_its_padding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(CENSUS))
    assert run(["data", "convert", str(tmp_path / "x.csv.gz"), str(tmp_path / "out")]) == 0
    assert "3 rows; no header line: columns are named c0 to c3" in capsys.readouterr().out
    assert [tuple(row.values()) for row in read(tmp_path / "out")] == [
        (38, "Private", 6, "- 50000."), (44, None, 37, "50000+."), (2, "Not in universe", None, "- 50000."),
    ]  # fmt: skip
    (tmp_path / "x.csv").write_bytes(CENSUS * 9 + b"x,,,\n")
    with pytest.raises(DataError, match=r"line 28: .*invalid value 'x'"):
        list(convert(str(tmp_path / "x.csv"), tmp_path / "other", text=TextOptions(types={"c0": "int64"})))


@pytest.mark.parametrize(
    ("text", "header"),
    [
        (b"a,b\n1,2\n", True),
        (b"1,2\n3,4\n", False),
        (b"x,2024-01-31\ny,2024-02-01\n", False),
        (b"red,big\nred,small\n", False),
        (b"red,big\nblue,small\n", True),  # nothing shows it
        (b"\xef\xbb\xbfname,n\nx,1\n", True),
        (b",n\n0,1\n", True),  # pandas' index has no name
        (b"2nd,size\na,1\n", True),
        (b'"a","b,c"\n1,2\n', True),
    ],
)
def test_whether_a_first_line_holds_names(tmp_path: Path, text: bytes, header: bool) -> None:
    (tmp_path / "x.csv").write_bytes(text)
    for told, names in ((None, header), (not header, not header)):
        out = tmp_path / f"out-{told}"
        (done,) = convert(str(tmp_path / "x.csv"), out, text=TextOptions(header=told))
        assert done.rows == 2 - names and all(len(row) == 2 for row in read(out))
        assert ([*read(out)[0]] == ["c0", "c1"]) is not names


def test_only_columns_that_are_padded_throughout_lose_their_spaces(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"a,b,n\n x, y, 1\nz, y,2\n")
    list(convert(str(tmp_path / "x.csv"), tmp_path / "out"))
    assert [tuple(row.values()) for row in read(tmp_path / "out")] == [(" x", "y", 1), ("z", "y", 2)]


def test_files_with_and_without_a_header_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"user,n\nx,1\n")
    (tmp_path / "b.csv").write_bytes(b"y,2\n")
    with pytest.raises(DataError, match=r"looks like data, but .*a.csv has a header.*--no-header") as caught:
        list(convert(str(tmp_path), tmp_path / "out"))
    assert caught.value.file == str(tmp_path / "b.csv")
    text = TextOptions(header=False, types={"c1": "string"})
    assert [done.rows for done in convert(str(tmp_path), tmp_path / "out", text=text)] == [
        2,
        1,
    ]


def test_a_first_line_longer_than_the_look_is_read_as_names(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"a" * (1 << 19) + b",b\n1,2\n")
    list(convert(str(tmp_path / "x.csv"), tmp_path / "out"))
    assert [tuple(row.values()) for row in read(tmp_path / "out")] == [(1, 2)]


def test_avro_types_become_those_of_arrow(tmp_path: Path) -> None:
    code = {"type": "fixed", "name": "code", "size": 3}
    pair = [{"name": "id", "type": "long"}, {"name": "w", "type": "float"}]
    cents = {"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 2}
    fields: dict[str, tuple[Any, Any, pa.DataType]] = {
        "int": ("int", 7, pa.int32()),
        "wide": (["int", "long"], 1 << 40, pa.int64()),
        "number": (["null", "float", "double"], 0.5, pa.float64()),
        "text": (["null", "string"], "a", pa.string()),
        "raw": ("bytes", b"a", pa.binary()),
        "at": ({"type": "long", "logicalType": "timestamp-micros"}, 5, pa.timestamp("us", "UTC")),
        "cents": (cents, Decimal("1.25"), pa.decimal128(5, 2)),
        "ids": ({"type": "array", "items": ["null", "int"]}, [1, None], pa.list_(pa.int32())),
        "pair": ({"type": "record", "name": "pair", "fields": pair}, {"id": 1, "w": 0.5},
                 pa.struct({"id": pa.int64(), "w": pa.float32()})),
        "color": ({"type": "enum", "name": "color", "symbols": ["a"]}, "a", pa.string()),
        "hue": ("color", "a", pa.string()),
        "codes": ({"type": "record", "name": "codes", "fields": [
                      {"name": "one", "type": code}, {"name": "other", "type": "code"}]},
                  {"one": b"abc", "other": b"def"}, pa.struct({"one": pa.binary(3), "other": pa.binary(3)})),
    }  # fmt: skip
    listed = [{"name": name, "type": kind} for name, (kind, _, _) in fields.items()]
    row = {name: value for name, (_, value, _) in fields.items()}
    with open(tmp_path / "x.avro", "wb") as file:
        fastavro.writer(file, {"type": "record", "name": "row", "fields": listed}, [row])
    (done,) = convert(str(tmp_path / "x.avro"), tmp_path / "out")
    found = pq.read_table(done.files[0])
    assert {name: found.schema.field(name).type for name in fields if name != "ids"} == {
        name: kind for name, (_, _, kind) in fields.items() if name != "ids"
    }
    assert found.schema.field("ids").type.value_type == pa.int32() and found["ids"].to_pylist() == [[1, None]]
    with open(tmp_path / "y.avro", "wb") as file:
        unread = {"type": "record", "name": "row", "fields": [{"name": "x", "type": ["string", "int"]}]}
        fastavro.writer(file, unread, [{"x": "a"}])
    with pytest.raises(DataError, match="unsupported Avro type"):
        list(convert(str(tmp_path / "y.avro"), tmp_path / "other"))
