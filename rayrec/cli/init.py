"""`rayrec init`: from files of unknown columns to a config that trains as it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from rayrec.cli.next_steps import next_is
from rayrec.cli.options import Label


def init(
    data: Annotated[
        list[str], typer.Argument(metavar="DATA…", help="Parquet, CSV, TSV, JSON lines, Avro or ORC: files or folders.")
    ],
    label: Label = None,
    name: Annotated[
        str | None, typer.Option(help="Of the config and the run; default: that of the first file.")
    ] = None,
) -> None:
    """Inspect data and write a config that trains on it, with some rows held out for evaluation."""
    import torch
    import yaml

    from rayrec._runtime.cgroup_limits import cpus
    from rayrec.cli.tables import show_columns
    from rayrec.data.tools.init.make_config import Machine, removed_on_failure, start
    from rayrec.train.config.file import parse_config
    from rayrec.train.driver.terminal import visible

    name = name or _name_of(data[0])
    if _name_of(name) != name:
        raise ValueError(f"--name {name}: letters, digits, dashes and underscores only; try --name {_name_of(name)}")
    file, folder = Path(f"{name}.yaml"), Path(f"{name}-data")
    for path in (file, folder):
        if path.exists():
            raise ValueError(f"{path} exists already and is not overwritten: take another --name, or remove it")
    machine = Machine(cores=int(cpus()), gpus=torch.cuda.device_count())
    with removed_on_failure(folder):
        started = start(data, name, folder, machine, label, lambda text: typer.echo(visible(text)))
        parse_config(started.config)
        show_columns(started.inspection, to_stderr=False)
        values = yaml.safe_dump(started.config, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
        with open(file, "x", encoding="utf-8") as out:
            out.write(f"# Made by `rayrec init`. `rayrec config {file}` shows it with all defaults.\n{values}")
    typer.echo(f"wrote {file}" + (f" and {folder}" if folder.exists() else ""))
    next_is("rayrec", "train", str(file))


def _name_of(path: str) -> str:
    """The name of a run, from that of a file or folder."""
    stem = path.partition("?")[0].rstrip("/").rpartition("/")[2].partition(".")[0]
    name = re.sub(r"[^\w.-]+", "-", stem, flags=re.ASCII).strip("-._")
    return name or "first"
