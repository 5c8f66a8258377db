"""Which formats a file's name means, so that errors about files that are not Parquet can say what to do."""

from __future__ import annotations

_FORMATS = {
    ".csv": "CSV",
    ".tsv": "TSV",
    ".jsonl": "JSON lines",
    ".ndjson": "JSON lines",
    ".json": "JSON lines",
    ".avro": "Avro",
    ".orc": "ORC",
}
_COMPRESSED = ("", ".gz", ".bz2", ".zst")
_BY_SUFFIX = {
    suffix + end: kind
    for suffix, kind in _FORMATS.items()
    for end in _COMPRESSED
    if not end or kind not in ("Avro", "ORC")
}
SUFFIXES = tuple(_BY_SUFFIX)


def format_of(path: str) -> str | None:
    """The format that can be converted to Parquet, by the file's name."""
    name = path.partition("?")[0].lower() if "://" in path else path.lower()
    return next((kind for suffix, kind in _BY_SUFFIX.items() if name.endswith(suffix)), None)


def how_to_convert(path: str) -> str:
    """What makes Parquet of it."""
    return f"make Parquet of it: rayrec data convert {path} FOLDER; or begin with a whole config: rayrec init {path}"
