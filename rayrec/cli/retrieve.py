"""`rayrec index` and `rayrec retrieve`: an index over item vectors, and the best items for rows of files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayrec.cli.options import WhichCheckpoint, path


def index(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|ITEMS", help="A retriever's run or checkpoint, or Parquet with an item vector a row."
        ),
    ],
    out: Annotated[Path, typer.Argument(parser=path, metavar="OUT", help="Folder for the index; not there yet.")],
    items: Annotated[
        str | None, typer.Option(help="Of a RUN: Parquet of the items; default: all rows of its table.")
    ] = None,
    id_column: Annotated[str, typer.Option("--id", help="Column of item ids, each once.")] = "item",
    vector: Annotated[str, typer.Option(help="List column of numbers: the item's vector.")] = "vector",
    search: Annotated[str, typer.Option(help="exact, ivf or hnsw; the last two need rayrec[index].")] = "exact",
    recall: Annotated[float, typer.Option(help="Of the exact best that ivf or hnsw must find.")] = 0.98,
    k: Annotated[int, typer.Option(min=1, help="Items a query at which recall is measured.")] = 100,
    queries: Annotated[str | None, typer.Option(help="Parquet with a vector column, to tune ivf or hnsw with.")] = None,
    tables: Annotated[str, typer.Option(help="Of a RUN's query tower: fp32, fp16, int8 or int4.")] = "fp32",
    extend: Annotated[
        Path | None, typer.Option(parser=path, help="An index whose items, tower and search OUT has, too.")
    ] = None,
    checkpoint: WhichCheckpoint = "newest",
) -> None:
    """Make an index of a run, or over item vectors; other columns of the items are attributes to filter by."""
    from rayrec.checkpoint.manifest import MANIFEST
    from rayrec.inference.index import ItemIndex, Search, write_index
    from rayrec.inference.retrieve import read_vectors
    from rayrec.train.after.index import index_run
    from rayrec.train.driver.terminal import notice
    from rayrec.train.run.mirror import holds, run_here

    wanted = Search(kind=search, recall=recall, k=k)
    of_run: dict[str, object] = {"--items": items, "--tables": tables != "fp32", "--checkpoint": checkpoint != "newest"}
    of_vectors: dict[str, object] = {"--queries": queries, "--extend": extend, "--vector": vector != "vector"}
    if holds(source, "config.yaml", MANIFEST):  # a run, or a checkpoint of one
        _refuse(of_vectors, f"{source} is a run")
        with run_here(source, notice) as run:
            report = index_run(run, out, items, id_column, search=wanted, tables=tables, checkpoint=checkpoint)
    else:
        _refuse(of_run, f"{source} is no run, but item vectors")
        if extend is not None:
            _refuse({"--queries": queries, "--search": search != "exact"}, f"the search is that of {extend}")
        vectors, table = read_vectors(source, vector, id_column)
        if extend is not None:
            report = ItemIndex(extend).extended(out, vectors, table)
        else:
            tuning = None if queries is None else read_vectors(queries, vector, None)[0]
            report = write_index(out, vectors, table, search=wanted, queries=tuning)
    typer.echo(f"{out}: {report.items:,} items of {report.dim} numbers, {report.search} search, {report.version}")
    if report.apart is not None:
        typer.echo(f"parity: queries differ by at most {report.apart:.2g} from those of the model as it was trained")
    if report.recall is not None:
        typer.echo(
            f"recall@{report.k} {report.recall:.4f} of exact search, {report.speedup:.1f} times as fast, measured with "
            f"{report.tuned_on}"
        )
        if report.recall < recall:
            typer.echo(f"the wanted recall of {recall} was not reached; take --search exact")


def _refuse(given: dict[str, object], why: str) -> None:
    """
    Raises:
        ValueError: one of these options is given.
    """
    for option, value in given.items():
        if value:
            raise ValueError(f"{why}, which takes no {option}: leave it out")


def retrieve(
    place: Annotated[Path, typer.Argument(parser=path, metavar="INDEX", help="Folder of an index.")],
    data: Annotated[str, typer.Argument(metavar="DATA", help="Parquet file, folder or glob: a query a row.")],
    out: Annotated[Path, typer.Argument(parser=path, metavar="OUT", help="Folder for the results.")],
    k: Annotated[int, typer.Option(min=1, help="Items a row.")] = 100,
    history: Annotated[str | None, typer.Option(help="List column of item ids, oldest first.")] = None,
    vector: Annotated[str | None, typer.Option(help="List column of numbers: the query's vector.")] = None,
    exclude: Annotated[str | None, typer.Option(help="List column of ids that a row must not get.")] = None,
    keep_seen: Annotated[bool, typer.Option("--keep-seen", help="Items of the history may come again.")] = False,
    vectors: Annotated[bool, typer.Option("--vectors", help="Also add each row's query vector.")] = False,
) -> None:
    """Find the best items for each row: adds the columns `items` and `scores`. Without --history or --vector, rows have
    the columns that the run was trained with."""
    from rayrec.inference.index import ItemIndex
    from rayrec.inference.retrieve import RetrieveOptions
    from rayrec.inference.retrieve import retrieve as run

    wanted = RetrieveOptions(k=k, history=history, vector=vector, keep_seen=keep_seen, exclude=exclude, vectors=vectors)
    done = run(ItemIndex(place), data, out, wanted)
    typer.echo(f"{out}: {done.rows:,} rows in {done.files} files, {done.rows / max(done.seconds, 1e-9):,.0f} rows/s")
