"""Text files that rayrec did not make: separators, headers, encodings, quotes, ids and numbers as people write them."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rayrec.cli import run
from rayrec.data import DataError, Manifest, Schema, TextOptions, convert

DRAWN = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
NUMBERS = [{"user": n % 7, "item": n % 11, "at": 1_600_000_000 + n, "clicked": n % 2} for n in range(60)]


def read(file: Path, content: str | bytes, text: TextOptions | None = None) -> tuple[list[dict[str, Any]], str]:
    """The rows of a file with this content, and the note for the user."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    out = file.parent / f"{len(list(file.parent.iterdir()))}"
    (done,) = convert(str(file), out, text=text)
    return pq.read_table(out).to_pylist(), done.note


def lines(rows: list[dict[str, Any]], separator: str = ",", header: bool = True) -> str:
    cells = [list(rows[0])] * header + [list(row.values()) for row in rows]
    return "".join(separator.join(map(str, line)) + "\n" for line in cells)


@pytest.mark.parametrize("separator", [",", ";", "\t", "|", "::", "\x01", "^", " "])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.txt", "a.dat", "a.data", "a.inter"])
def test_the_separator_is_found_whatever_the_name_says(separator: str, name: str, tmp_path: Path) -> None:
    rows, note = read(tmp_path / name, lines(NUMBERS, separator))
    assert rows == NUMBERS
    usual = "\t" if name == "a.tsv" else ","
    assert (f"cells are separated by {separator!r}" in note) == (separator != usual)


def test_a_decimal_comma_does_not_pass_for_a_separator(tmp_path: Path) -> None:
    content = "shop;price;n\n" + "".join(f"s{n};{n},5;{n}\n" for n in range(30))
    rows, _ = read(tmp_path / "a.csv", content, TextOptions(decimal=","))
    assert rows[3] == {"shop": "s3", "price": 3.5, "n": 3}


CELLS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=8)


@DRAWN
@given(
    cells=st.lists(st.tuples(CELLS, st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=30),
    separator=st.sampled_from([",", ";", "\t", "|"]),
)
@example(cells=[("\\", 0)], separator=",")
@example(cells=[(" ", 0)], separator=",")
@example(cells=[(" , ", 0), (" b", 1)], separator=",")
def test_texts_of_any_characters_come_back(cells: list[tuple[str, int]], separator: str, tmp_path: Path) -> None:
    out = io.StringIO()
    csv.writer(out, delimiter=separator, quoting=csv.QUOTE_ALL).writerows([("text", "number"), *cells])
    options = TextOptions(separator=separator, nulls=[], types={"text": "string"})
    rows, _ = read(tmp_path / "a.csv", out.getvalue(), options)
    assert [(row["text"], row["number"]) for row in rows] == cells


@DRAWN
@given(numbers=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=30))
def test_whole_numbers_are_never_floats(numbers: list[int], tmp_path: Path) -> None:
    content = "id,x\n" + "".join(f"{number},1\n" for number in numbers)
    assert [row["id"] for row in read(tmp_path / "a.csv", content)[0]] == numbers
    content = "".join(json.dumps({"id": number}) + "\n" for number in numbers)
    assert [row["id"] for row in read(tmp_path / "a.jsonl", content)[0]] == numbers


def test_numbers_beyond_64_bits_are_texts_or_refused(tmp_path: Path) -> None:
    big = str(2**70)
    assert read(tmp_path / "a.csv", f"id,x\n{big},1\n")[0][0]["id"] == big
    with pytest.raises(DataError, match=r"is beyond 64 bits .*--type id=string"):
        read(tmp_path / "a.jsonl", f'{{"id": {big}}}\n')
    assert read(tmp_path / "b.jsonl", f'{{"id": {big}}}\n', TextOptions(types={"id": "string"}))[0] == [{"id": big}]


def test_leading_zeros_make_a_text(tmp_path: Path) -> None:
    rows, _ = read(tmp_path / "a.csv", 'shop,zip\n007,"01234"\n7,99\n')
    assert [row["shop"] for row in rows] == ["007", "7"] and rows[0]["zip"] == "01234"
    rows, _ = read(tmp_path / "b.csv", "n\n0\n-0.5\n0.25\n")
    assert [row["n"] for row in rows] == [0, -0.5, 0.25]
    late = "shop,x\n" + f"7,{'x' * 1000}\n" * 9000 + "007,x\n"  # after the 8 MB from which types are inferred
    with pytest.raises(DataError, match=r"line 9002: '007' has a leading zero, .*--type shop=string"):
        read(tmp_path / "c.csv", late)


def test_a_leading_zero_makes_a_text_where_numbers_have_thousands_too(tmp_path: Path) -> None:
    options = TextOptions(separator=";", thousands="'")
    rows, _ = read(tmp_path / "a.csv", "customer;amount\n000082;1'819\n000137;+99\n", options)
    assert [(row["customer"], row["amount"]) for row in rows] == [("000082", 1819), ("000137", 99)]
    late = "shop;x\n" + f"7;{'x' * 1000}\n" * 9000 + "007;x\n"
    with pytest.raises(DataError, match=r"line 9002: '007' has a leading zero, .*--type shop=string"):
        read(tmp_path / "b.csv", late, options)
    typed = TextOptions(separator=";", thousands="'", types={"customer": "int64"})
    assert read(tmp_path / "c.csv", "customer;amount\n000082;1\n", typed)[0][0]["customer"] == 82


def test_names_of_columns_have_no_spaces_around_them_and_come_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, _ = read(tmp_path / "a.csv", "# made by hand\n user, item id ,label\n1, 2, 0\n3, 4, 1\n")
    assert rows == [{"user": 1, "item id": 2, "label": 0}, {"user": 3, "item id": 4, "label": 1}]
    for n, head in enumerate(("\n\n user , item id\n", '"us\ner ", item id\n', "\r\nuser, item id\r\n")):
        rows, _ = read(tmp_path / f"d{n}.csv", head + "1,2\n\n3,4\n")
        assert [tuple(row.values()) for row in rows] == [(1, 2), (3, 4)] and [*rows[0]][1] == "item id"
    late = "user,x\n" + f"7,{'x' * 1000}\n" * 9000 + "user,x\n"
    with pytest.raises(DataError, match="line 9002: the line repeats the names of the columns"):
        read(tmp_path / "b.csv", late)
    (tmp_path / "c.csv").write_text("user,item\n" + "1,2\n" * 50 + "user,item\n" + "1,2\n" * 50)
    assert run(["init", str(tmp_path / "c.csv"), "--label", "item"]) == 1
    said = capsys.readouterr().err
    assert "'user': were files written one after the other" in said and "remove lines that repeat" in said


@DRAWN
@given(
    cells=st.lists(st.tuples(*[st.sampled_from([None, "N", 'a "b"', "c, d\n", "e\\\\"])] * 3), min_size=1, max_size=5),
    separator=st.sampled_from([",", "\t", "::"]),
)
def test_nulls_of_databases_are_null_where_quotes_have_a_backslash(
    cells: list[tuple[str | None, ...]], separator: str, tmp_path: Path
) -> None:
    def written(cell: str | None) -> str:
        return r"\N" if cell is None else '"' + cell.replace("\\", r"\\").replace('"', r"\"") + '"'

    rows = [('x "y"', "z", "z"), *cells]
    content = "".join(separator.join(map(written, row)) + "\n" for row in rows)
    options = TextOptions(separator=separator, names=["a", "b", "c"], types=dict.fromkeys("abc", "string"))
    assert [tuple(row.values()) for row in read(tmp_path / "a.csv", content, options)[0]] == rows


def test_the_schema_says_what_an_id_is(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("shop,label\n" + "7,1\n12,0\n" * 10)
    for id_type, expected in (("text", "string"), ("integer", "int64")):
        schema = Schema.model_validate({"sparse": [{"name": "shop", "mapping": {"kind": "hash"}, "id_type": id_type}]})
        manifest = Manifest.read(str(tmp_path / "a.csv"), schema)
        assert str(pq.read_schema(manifest.files.uris[0]).field("shop").type) == expected


def test_a_column_without_values_has_the_type_of_the_schema(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("shop,price,label\n" + ",,1\n,,0\n" * 10)
    sparse = [{"name": "shop", "mapping": {"kind": "hash"}, "id_type": "text", "on_null": "empty"}]
    schema = Schema.model_validate({"dense": [{"name": "price", "default": 0.0}], "sparse": sparse})
    manifest = Manifest.read(str(tmp_path / "a.csv"), schema)
    types = pq.read_schema(manifest.files.uris[0])
    assert (str(types.field("shop").type), str(types.field("price").type)) == ("string", "double")


@pytest.mark.parametrize(
    ("first", "header"),
    [("click,101,122", True), ("a,b,c", True), ("0,12,7", False), ("NA,12,7", False), ("click,102,102b", True)],
)
def test_names_may_be_numbers(first: str, header: bool, tmp_path: Path) -> None:
    rows, _ = read(tmp_path / "a.csv", first + "\n" + "1,12,8\n0,16,18\n" * 20)
    assert len(rows) == 40 + (not header) and list(rows[0]) == (first.split(",") if header else ["c0", "c1", "c2"])


def test_names_can_be_given(tmp_path: Path) -> None:
    options = TextOptions(names=["user", "item"])
    assert read(tmp_path / "a.csv", "3,4\n5,6\n", options)[0] == [{"user": 3, "item": 4}, {"user": 5, "item": 6}]
    with_header = options.model_copy(update={"header": True})
    assert read(tmp_path / "a.csv", "a,b\n5,6\n", with_header)[0] == [{"user": 5, "item": 6}]


@pytest.mark.parametrize("content", ["a,b,a\n1,2,3\n", "a,b,a\nx,y,z\nu,v,w\n"])
def test_columns_of_one_name_are_refused(content: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="several columns are named 'a'"):
        read(tmp_path / "a.csv", content)


def test_cells_of_several_lines_are_read_wherever_they_are(tmp_path: Path) -> None:
    rows = [{"n": n, "text": f"first {n}\nsecond, {'x' * 300}"} for n in range(40_000)]
    content = "n,text\n" + "".join(f'{row["n"]},"{row["text"]}"\n' for row in rows)
    assert len(content) > 9 << 20
    assert read(tmp_path / "a.csv", content)[0] == rows


def test_quotes_after_a_backslash_are_part_of_the_cell(tmp_path: Path) -> None:
    content = "n,title\n" + "".join(f'{n},"the \\"best\\" book, {n}"\n' for n in range(20))
    rows, note = read(tmp_path / "a.csv", content)
    assert rows[7]["title"] == 'the "best" book, 7' and "backslash" in note
    assert read(tmp_path / "b.csv", "n;t\n" + '1;5" disk\n' * 9, TextOptions(quote=""))[0][0] == {
        "n": 1,
        "t": '5" disk',
    }


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "latin-1", "cp1252", "gbk"])
def test_text_in_other_encodings_is_decoded_or_refused(encoding: str, tmp_path: Path) -> None:
    city = "北京" if encoding == "gbk" else "Köln"
    content = ("city,n\n" + "Bonn,1\n" * 5 + f"{city},2\n").encode(encoding)
    if not encoding.startswith("utf"):
        with pytest.raises(DataError, match=r"line 7: the text is not utf-8 .*--encoding latin-1") as caught:
            read(tmp_path / "a.csv", content)
        assert caught.value.row == 7
    options = TextOptions() if encoding.startswith("utf") else TextOptions(encoding=encoding)
    assert read(tmp_path / "b.csv", content, options)[0][-1] == {"city": city, "n": 2}


def test_bytes_that_are_no_text_late_in_a_file_are_refused(tmp_path: Path) -> None:
    content = b"city,n\n" + b"Bonn,1\n" * 1_300_000 + b"K\xf6ln,2\n"
    with pytest.raises(DataError, match="line 1300002: the text is not utf-8"):
        read(tmp_path / "a.csv", content)


@DRAWN
@given(
    lists=st.lists(st.none() | st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=6),
    separator=st.sampled_from([";", "|", " ", "#", ", "]),
    brackets=st.sampled_from(["{}", "[]", "()"]),
    quote=st.sampled_from(["", "'"]),
    end=st.booleans(),
)
def test_lists_in_brackets_of_any_kind_are_lists(
    lists: list[list[int] | None], separator: str, brackets: str, quote: str, end: bool, tmp_path: Path
) -> None:
    """`{1;2}`, `(1, 2,)`, `['1' '2']`, `[]`, and an empty cell, which is null."""

    def cell(items: list[int] | None) -> str:
        inner = separator.join(f"{quote}{item}{quote}" for item in items or ()) + (separator if end and items else "")
        return "" if items is None else f"{brackets[0]}{inner}{brackets[1]}"

    options = TextOptions(separator="\t", lists={"seen": separator}, types={"seen": "list<int64>"})
    content = "".join(f"1\t{cell(items)}\n" for items in lists)
    rows, _ = read(tmp_path / "a.csv", "user\tseen\n" + content, options)
    assert [row["seen"] for row in rows] == lists


def test_brackets_of_items_stay(tmp_path: Path) -> None:
    cells = {"(sci-fi)|(x)": ["(sci-fi)", "(x)"], "[a]|[b]": ["[a]", "[b]"], "{a|b": ["{a", "b"], "(a|b)": ["a", "b"]}
    cells |= {"(no genres listed)": ["(no genres listed)"], "(5)": ["5"], "[x y]": ["[x y]"], "[x y|z]": ["x y", "z"]}
    content = "user\tgenres\n" + "".join(f"1\t{cell}\n" for cell in cells)
    rows, _ = read(tmp_path / "a.csv", content, TextOptions(separator="\t", lists={"genres": "|"}))
    assert [row["genres"] for row in rows] == [*cells.values()]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("N{a} N{b} N{c}{more}", " "),
        ("{a}#{b}{hash}", "#"),
        ("{{{a};{b}}}", ";"),
        ("the {a} of the {b}", None),
        ("{c} {a} 20{b:02}", None),
        ("( )", None),
        ("{a}:{b} PM", None),
    ],
)
def test_lists_of_ids_are_found_and_texts_are_not(
    written: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more = [{"more": f" N{n % 7}" * (n % 2), "hash": f"#{n % 7}" * (n % 2)} for n in range(400)]
    cells = [written.format(a=n % 19, b=n * 7 % 23, c=n % 5, **more[n]) for n in range(400)]
    Path("log.csv").write_text("user,x,click\n" + "".join(f"{n % 30},{x},{n % 2}\n" for n, x in enumerate(cells)))
    assert run(["init", "log.csv", "--label", "click"]) == 0
    text = yaml.safe_load(Path("log.yaml").read_text())["data"].get("read", {}).get("text", {})
    assert text.get("lists", {}).get("x") == expected


def test_lists_times_and_numbers_are_parsed_as_told(tmp_path: Path) -> None:
    content = 'a;b;c;at;n\n1|2;x, y;"[3, 4]";31.12.2024 23:59;1.204,5\n;;[];01.01.2025 00:00;7,25\n'
    options = TextOptions(
        lists={"a": "|", "b": ",", "c": "json"}, times={"at": "%d.%m.%Y %H:%M"}, decimal=",", thousands="."
    )
    first, second = read(tmp_path / "a.csv", content, options)[0]
    assert (first["a"], first["b"], first["c"], first["n"]) == ([1, 2], ["x", "y"], [3, 4], 1204.5)
    assert (second["a"], second["c"], second["n"]) == (None, [], 7.25)
    assert first["at"].isoformat() == "2024-12-31T23:59:00"
    with pytest.raises(DataError, match=r"line 2: '31/12/2024' does not have the time format"):
        read(tmp_path / "b.csv", "at,n\n31/12/2024,1\n", TextOptions(times={"at": "%d.%m.%Y"}))
    with pytest.raises(DataError, match=r"line 3: 'x' is not a list"):
        read(tmp_path / "c.csv", 'a;n\n"[1]";1\nx;2\n', TextOptions(lists={"a": "json"}))


ROWS = [{"user": f"A{n}", "stars": n % 5, "at": None if n % 3 else n, "tags": ["x", "y"][: n % 3]} for n in range(300)]


@pytest.mark.parametrize("form", ["array", "indented", "dicts"])
def test_json_as_other_programs_write_it(form: str, tmp_path: Path) -> None:
    texts = {
        "array": json.dumps(ROWS),
        "indented": json.dumps(ROWS, indent=2),
        "dicts": "".join(f"{row}\n" for row in ROWS),
    }
    assert read(tmp_path / "a.json", texts[form])[0] == ROWS


def test_json_values_of_several_types_are_read_as_text_if_told(tmp_path: Path) -> None:
    content = '{"votes": "1,204", "n": 1}\n{"votes": 3, "n": 2}\n{"n": 3}\n'
    with pytest.raises(DataError, match=r"votes.*--type votes=string"):
        read(tmp_path / "a.json", content)
    rows, _ = read(tmp_path / "b.json", content, TextOptions(types={"votes": "string"}))
    assert [row["votes"] for row in rows] == ["1,204", "3", None]


@pytest.mark.parametrize("name", ["a.txt", "a.data"])
def test_json_in_a_file_whose_name_does_not_say_it(name: str, tmp_path: Path) -> None:
    assert read(tmp_path / name, "".join(json.dumps(row) + "\n" for row in ROWS))[0] == ROWS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[]", "the file is empty"),
        ("a.csv.gz", "user,n\n1,2\n", "check that the file is whole, and compressed"),
    ],
)
def test_a_file_that_cannot_be_read_says_what_to_look_at(name: str, content: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path / name, content)


def test_signs_before_whole_numbers(tmp_path: Path) -> None:
    assert [row["n"] for row in read(tmp_path / "a.csv", "n,x\n+1,a\n-2,b\n3,c\n")[0]] == [1, -2, 3]


def test_a_broken_array_is_refused_at_its_item(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="item 2 of the array"):
        read(tmp_path / "a.json", '[{"a": 1}, {"a": }]')


def test_an_option_of_a_column_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file has this column"):
        read(tmp_path / "a.csv", "user,n\n1,2\n", TextOptions(types={"usr": "string"}))


def test_init_writes_what_it_found_and_evaluation_reads_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    genres = ["War", "Drama", "Comedy", "Action"]
    content = "shop;genres;votes;price;click\n" + "".join(
        f'{n % 30:03};{"|".join(genres[: 1 + n % 4][::-1] if n % 7 else genres[n % 4 :])};"{1000 + n:,}";'
        f"{'—' if n % 100 == 7 else n / 10};{n % 3 % 2}\n"
        for n in range(600)
    )
    Path("log.csv").write_text(content)
    assert run(["init", "log.csv", "--label", "click", "--null", "—"]) == 0
    said = capsys.readouterr().out
    assert "5 columns separated by ';', utf-8, names in the first line" in said
    assert "numbers have ',' between thousands: votes" in said
    raw = yaml.safe_load(Path("log.yaml").read_text())
    text = raw["data"]["read"]["text"]
    assert (text["separator"], text["thousands"]) == (";", ",") and "—" in text["nulls"]
    kinds = {feature["name"]: feature["kind"] for feature in raw["schema"]["sparse"]}
    assert kinds["shop"] == "id" and "price" not in kinds and "votes" not in kinds
    capsys.readouterr()
    assert run(["train", "log.yaml", "--set", "trainer.epochs=1"]) == 0
    Path("later.csv").write_text("\n".join(content.splitlines()[:200]) + "\n")
    assert run(["evaluate", "runs/log", "--data", "later.csv"]) == 0


COMMENTS = [["# exported 2024-01-01"], ["% a, b", "", '% c "d'], ["// one", "// two; three", "//"], ["  #x,y"]]


@pytest.mark.parametrize("comments", COMMENTS, ids=str)
@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_comments_before_the_header_are_skipped(
    comments: list[str], separator: str, header: bool, line_end: str, tmp_path: Path
) -> None:
    content = "\n".join([*comments, lines(NUMBERS, separator, header)]).replace("\n", line_end)
    rows, note = read(tmp_path / "a.csv", content)
    assert [list(row.values()) for row in rows] == [list(row.values()) for row in NUMBERS]
    assert "comment" in note
    names = TextOptions(names=["a", "b", "c", "d"], header=header)
    assert read(tmp_path / "b.csv", content, names)[0][5] == dict(zip("abcd", NUMBERS[5].values(), strict=True))
    typed = TextOptions(types={"user" if header else "c0": "int64"})
    with pytest.raises(DataError, match=rf"line {len(comments) + header + len(NUMBERS) + 1}: .*'x'"):
        read(tmp_path / "c.csv", content + separator.join("x123"), typed)


@pytest.mark.parametrize(
    "content", ["#user,item\n1,2\n3,4\n", "# a\n#user,item\n1,2\n3,4\n", "#a,x\n#b,y\n#c,z\nd,w\n"]
)
def test_a_header_or_a_row_that_begins_like_a_comment_is_kept(content: str, tmp_path: Path) -> None:
    rows, _ = read(tmp_path / "a.csv", content)
    last = content.splitlines()[-1].split(",")
    assert [str(value) for value in rows[-1].values()] == last
    assert next(iter(rows[0])) in ("#user", "#a", "c0") and len(rows) >= 2


def test_a_text_of_one_column_has_no_comments(tmp_path: Path) -> None:
    rows, _ = read(tmp_path / "a.txt", "#war\n#peace\nlove\n", TextOptions(names=["tag"]))
    assert [row["tag"] for row in rows] == ["#war", "#peace", "love"]


@pytest.mark.parametrize(
    ("decimal", "thousands"),
    [
        (".", ","),
        (",", None),
        (",", "."),
        (",", " "),
        (",", "\xa0"),
        (",", "\u202f"),
        (".", "'"),
        (".", "’"),
        (".", " "),
    ],
)
def test_init_finds_how_numbers_are_written(
    decimal: str, thousands: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prices = [n * 37.25 - 900 for n in range(300)]

    def written(price: float) -> str:
        return f"{price:_.2f}".replace(".", decimal).replace("_", thousands or "")

    rows = "".join(f"{n % 30};{written(price)};10.0.0.{n % 9};{n % 2}\n" for n, price in enumerate(prices))
    Path("log.csv").write_text("user;price;address;click\n" + rows, encoding="utf-8")
    assert run(["init", "log.csv", "--label", "click"]) == 0
    raw = yaml.safe_load(Path("log.yaml").read_text(encoding="utf-8"))
    text = raw["data"]["read"]["text"]
    assert (text.get("decimal", "."), text.get("thousands")) == (decimal, thousands)
    assert [feature["name"] for feature in raw["schema"]["dense"]] == ["price"]
    found = pq.read_table("log-data/train").to_pylist() + pq.read_table("log-data/eval").to_pylist()
    assert sorted(row["price"] for row in found) == prices
    assert {row["address"] for row in found} == {f"10.0.0.{n}" for n in range(9)}


@pytest.mark.parametrize(
    ("columns", "said", "expected"),
    [
        # 1.234 may be 1234: asked, and read as written
        ({"price": "{a}.{b}"}, "all numbers with a point have three digits after it: price", {}),
        ({"price": "{a}.{b}", "weight": "{a},5"}, "between thousands: price", {"decimal": ",", "thousands": "."}),
        ({"votes": "{a},{b}"}, "1,204 is read as 1204", {"thousands": ","}),
        ({"votes": "{a},{b}", "weight": "{a},25"}, "as the decimal point: votes, weight", {"decimal": ","}),
        ({"price": "{a},5", "weight": "0.5"}, "differ in their decimal points", {}),
        ({"price": "{a},5", "weight": "{a}'{b}.5"}, "differ in their decimal points", {}),
    ],
    ids=str,
)
def test_init_says_where_numbers_have_two_readings(
    columns: dict[str, str],
    said: str,
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = (";".join(text.format(a=n % 9 + 1, b=100 + n) for text in columns.values()) for n in range(300))
    Path("log.csv").write_text(
        f"user;{';'.join(columns)};click\n" + "".join(f"{n % 30};{row};{n % 2}\n" for n, row in enumerate(rows))
    )
    assert run(["init", "log.csv", "--label", "click"]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    text = yaml.safe_load(Path("log.yaml").read_text())["data"]["read"]["text"]
    assert {key: text[key] for key in ("decimal", "thousands") if key in text} == expected


def test_init_tells_of_numbers_among_which_are_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    content = "item,price,click\n" + "".join(
        f"{n % 30},{'—' if n % 100 == 7 else n / 10},{n % 2}\n" for n in range(600)
    )
    Path("log.csv").write_text(content)
    assert run(["init", "log.csv", "--label", "click"]) == 0
    assert "'price': 594 of 600 are numbers; the others: '—'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("columns", "options", "expected"),
    [
        ({"tags": '"{c},{d}"'}, [], {"lists": {"tags": ","}}),
        ({"price": '"{a},{cents:02}"'}, [], {"decimal": ","}),
        ({"tags": '"{c},{d}"', "price": '"{a},{cents:02}"'}, [], {"decimal": ","}),
        (
            {"tags": '"{c},{d}"', "price": '"{a},{cents:02}"'},
            ["--lists", "tags"],
            {"decimal": ",", "lists": {"tags": ","}},
        ),
        ({"rate": '"{c},{d}"'}, ["--decimal", ","], {"decimal": ","}),
        ({"votes": '"{a},{m}"'}, [], {"thousands": ","}),
        ({"shops": '"{m},{k}"'}, [], {"lists": {"shops": ","}}),
    ],
    ids=str,
)
def test_pairs_in_a_file_with_commas_are_lists_unless_they_are_prices(
    columns: dict[str, str],
    options: list[str],
    expected: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = (
        ",".join(
            text.format(a=n % 90 + 1, c=n % 7, d=7 + n % 11, m=100 + 70 * n % 900, k=100 + n % 11, cents=37 * n % 100)
            for text in columns.values()
        )
        for n in range(300)
    )
    Path("log.csv").write_text(
        f"user,{','.join(columns)},click\n" + "".join(f"{n % 30},{row},{n % 2}\n" for n, row in enumerate(rows))
    )
    assert run(["init", "log.csv", "--label", "click", *options]) == 0
    text = yaml.safe_load(Path("log.yaml").read_text())["data"]["read"]["text"]
    assert {key: text[key] for key in ("decimal", "thousands", "lists") if key in text} == expected
    asked = "if the comma is a decimal point in " in capsys.readouterr().out
    assert asked is (list(columns) in (["tags"], ["shops"]))
