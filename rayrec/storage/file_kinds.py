"""What a file is, by its first bytes: formats that rayrec does not read under the name that the file has."""

from __future__ import annotations

_UNPACK = "unpack it, and give the files in it"
_EXPORT = "export the table as CSV or Parquet"
_WRITE = "write its table as Parquet, e.g. pandas.DataFrame(…).to_parquet"
# First bytes → the kind, and the fix.
_KINDS = {
    b"\x1f\x8b": ("compressed with gzip", "give it the suffix .gz, e.g. a.csv.gz; unpack a tar archive"),
    b"BZh9": ("compressed with bzip2", "give it the suffix .bz2, e.g. a.csv.bz2; unpack a tar archive"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "give it the suffix .zst, e.g. a.csv.zst"),
    b"\xfd7zXZ\x00": ("compressed with xz", "unpack it, or compress it with gzip"),
    b"PK\x03\x04": (
        "a zip archive",
        f"{_UNPACK}; of a workbook (.xlsx) {_EXPORT}; of NumPy arrays (.npz) write Parquet",
    ),
    b"7z\xbc\xaf": ("a 7-Zip archive", _UNPACK),
    b"Rar!": ("a RAR archive", _UNPACK),
    b"\xd0\xcf\x11\xe0": ("an Excel workbook", _EXPORT),
    b"PAR1": ("Parquet", "give it the suffix .parquet"),
    b"Obj\x01": ("Avro", "give it the suffix .avro"),
    b"ARROW1\x00": (
        "an Arrow or Feather file",
        "write it as Parquet: pyarrow.feather.read_table, pyarrow.parquet.write_table",
    ),
    b"\x89HDF": ("HDF5", _WRITE),
    b"SQLite format 3\x00": ("an SQLite database", _EXPORT),
    b"\x93NUMPY": ("a NumPy array", _WRITE),
    b"\x80\x04\x95": ("a Python pickle", _WRITE),
    b"\x80\x05\x95": ("a Python pickle", _WRITE),
}
LONGEST = max(map(len, _KINDS))


def kind_of(data: bytes) -> tuple[str, str] | None:
    """The kind of a file with these first bytes, and what to do with it; None for text and unknown kinds."""
    return next((kind for begin, kind in _KINDS.items() if data.startswith(begin)), None)
