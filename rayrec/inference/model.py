"""`Model`: an exported folder, loaded to score."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rayrec.inference import artifact, compiled, processor
from rayrec.inference.artifact import ExportError, Index
from rayrec.inference.graph import arguments
from rayrec.models import Batch
from rayrec.quant.check import check_ids
from rayrec.sparse import KeyedJaggedTensor

_logger = logging.getLogger(__name__)


class Model:
    """Scores batches as the trainer's evaluation does. Threads may share one.

    Args:
        folder: what `export` wrote.
        target: "aoti", "eager", or None for the compiled graph where it is there and fits this machine; where it does
            not, the other one runs, and `warnings` and the log say why.
        checksums: read every file once and compare; False looks only at their sizes.

    Raises:
        ExportError: no whole export, a damaged file, or a graph that was asked for but does not run here; names file
            and fix.
    """

    def __init__(self, folder: str | Path, target: str | None = None, checksums: bool = True) -> None:
        self.folder = Path(folder)
        self.index: Index = artifact.read_index(self.folder)
        artifact.check_listed(self.folder, self.index.files, checksums)
        unfit = _unfit(self.index)
        self.target = target or ("aoti" if "aoti" in self.index.targets and unfit is None else "eager")
        if self.target not in self.index.targets:
            raise ExportError(
                f"{self.folder} holds no graph for {self.target!r}, but {self.index.targets}; "
                f"export with --target {self.target}"
            )
        if self.target == "aoti" and unfit is not None:
            raise ExportError(f"{self.folder}: {unfit}; take target='eager', or export for this machine")
        formats = {self.index.dense, *(place.format.value for place in self.index.places)}
        uncompiled = None if target or unfit is None else f"{unfit}: the uncompiled graph runs, which is slower"
        self.warnings = [warning for warning in (uncompiled, processor.why_slow(formats)) if warning is not None]
        for warning in self.warnings:
            _logger.warning("%s: %s", self.folder, warning)
        self.tables = artifact.map_tables(self.folder / artifact.TABLES)
        if self.target == "aoti":
            self._run = compiled.load_compiled(self.folder / artifact.AOTI)
        else:
            self._run = compiled.load_graph(self.folder / artifact.GRAPH)

    @property
    def version(self) -> str:
        """The export's name."""
        return self.index.version

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of what is predicted; "label" where there is one."""
        return self.index.inputs.labels or ("label",)

    def mapping_config(self) -> dict[str, Any]:
        """`schema` and `tables` of the training config, vocabularies being those in the folder."""
        return artifact.read_mapping(self.folder)

    def parity(self) -> Mapping[str, Any]:
        """What `parity.json` says."""
        found: dict[str, Any] = json.loads((self.folder / artifact.PARITY).read_text(encoding="utf-8"))
        return found

    def score(self, batch: Batch, context: KeyedJaggedTensor | None = None) -> torch.Tensor:
        """Logits float32 `[B]`, or `[B, T]` of several labels; labels of the batch are not read.

        Args:
            context: one row of features that all rows share, looked up once: some of `index.inputs.context`. The batch
                has the others.

        Raises:
            ValueError: features of other names, a number that is not finite, or an id outside its table; names
                feature and example.
        """
        inputs, shared = self.index.inputs, set() if context is None else set(context.keys())
        if not shared <= set(inputs.context or ()):
            raise ValueError(f"the model cannot share {sorted(shared)} between rows, but {list(inputs.context or ())}")
        sparse = self._checked(batch.sparse, [key for key in inputs.keys if key not in shared])
        if context is not None:
            context = self._checked(context, [key for key in inputs.keys if key in shared])
        dense = batch.dense
        if dense.dim() != 2 or dense.shape[1] != inputs.num_dense:
            raise ValueError(f"dense is {list(dense.shape)}; the model takes {inputs.num_dense} numbers an example")
        if not bool(dense.isfinite().all()):
            row, column = (~dense.isfinite()).nonzero()[0].tolist()
            raise ValueError(
                f"dense number {column} of example {row} is {float(dense[row, column])}; it must be finite"
            )
        if not dense.shape[0]:
            return torch.empty((0,) if inputs.labels is None else (0, len(inputs.labels)))
        checked = Batch(dense=dense.float(), sparse=sparse, label=batch.label)
        return self._run(arguments(checked, inputs, self.tables.data, context))

    def outputs(self, batch: Batch, context: KeyedJaggedTensor | None = None) -> dict[str, npt.NDArray[np.float32]]:
        """What a service answers: label → probabilities `[B]`, or predictions of a number. Arguments and errors as
        `score`."""
        answers = self.index.inputs.answers(self.score(batch, context)).T.contiguous().numpy()
        return dict(zip(self.labels, answers, strict=True))

    def _checked(self, sparse: KeyedJaggedTensor, keys: list[str]) -> KeyedJaggedTensor:
        """The features in the model's order, all ids inside their tables."""
        if sparse.keys() != keys:
            missing = [key for key in keys if key not in sparse.index_per_key()]
            if missing:
                raise ValueError(
                    f"the batch has no feature {missing[0]!r}; the model reads {list(self.index.inputs.keys)}"
                )
            sparse = sparse.permute([sparse.index_per_key()[key] for key in keys])
        check_ids(sparse, [self.index.rows_of[key] for key in keys], [self.index.table_of[key] for key in keys])
        weights = sparse.weights_or_none() if self.index.inputs.weighted else None
        if weights is not None and not bool(weights.isfinite().all()):
            raise ValueError("a weight of an id is not finite")
        return sparse


def _unfit(index: Index) -> str | None:
    """Why the compiled graph, if there is one, does not run on this processor with this torch; None: it does."""
    here = artifact.versions_here()
    if "aoti" not in index.targets:
        return None
    if index.versions.get("torch") != here["torch"]:
        return f"compiled with torch {index.versions.get('torch')}, here is {here['torch']}"
    if index.march is None:
        return "compiled by an earlier rayrec, which did not record for which processors"
    lacks = processor.missing(index.instructions)
    return f"compiled for {index.march} processors, this one lacks {', '.join(lacks)}" if lacks else None
