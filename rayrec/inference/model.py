"""`Model`: an export, loaded to score rows, or to compute queries."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rayrec.inference import artifact, compilation, processor
from rayrec.inference.artifact import ExportError, ExportIndex
from rayrec.inference.graph import arguments
from rayrec.models import Batch
from rayrec.quant.check import IdCheck
from rayrec.sparse import KeyedJaggedTensor

_logger = logging.getLogger(__name__)


class Model:
    """Scores batches like the trainer's evaluation. Thread-safe.

    Args:
        folder: Folder of the export.
        target: "aoti" or "eager". None: the compiled graph if it exists and fits this machine, else the uncompiled
            graph; `warnings` and the log say why.
        checksums: Compares the checksums of all files; False compares their sizes only.

    Raises:
        ExportError: The export is incomplete or damaged, or `target` is missing or does not fit this machine. Names
            file and fix.
    """

    def __init__(self, folder: str | Path, target: str | None = None, checksums: bool = True) -> None:
        self.folder = Path(folder)
        self.index: ExportIndex = artifact.read_index(self.folder)
        artifact.check_listed(self.folder, self.index.files, checksums)
        if not self.index.targets:
            raise ExportError(
                f"{self.folder} is {self.index.kind}, without a model; write one with `rayrec index RUN OUT`"
            )
        unfit = _why_unfit(self.index)
        self.target = target or ("aoti" if "aoti" in self.index.targets and unfit is None else "eager")
        if self.target not in self.index.targets:
            raise ExportError(
                f"{self.folder} has no graph for {self.target!r}, only {self.index.targets}; "
                f"export with --target {self.target}"
            )
        if self.target == "aoti" and unfit is not None:
            raise ExportError(f"{self.folder}: {unfit}; use target='eager', or export for this machine")
        self._check_ids = IdCheck(self.index.rows_of, self.index.table_of)
        formats = {self.index.dense, *(place.format.value for place in self.index.places)}
        uncompiled = None if target or unfit is None else f"{unfit}: using the uncompiled graph, which is slower"
        self.warnings = [warning for warning in (uncompiled, processor.why_slow(formats)) if warning is not None]
        for warning in self.warnings:
            _logger.warning("%s: %s", self.folder, warning)
        self.tables = artifact.map_tables(self.folder / artifact.TABLES)
        if self.target == "aoti":
            self._run = compilation.load_compiled(self.folder / artifact.AOTI)
        else:
            self._run = compilation.load_graph(self.folder / artifact.GRAPH)

    @property
    def version(self) -> str:
        """The version of the export."""
        return self.index.version

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels; ("label",) if there is a single one."""
        return self.index.inputs.labels or ("label",)

    def mapping_config(self) -> dict[str, Any]:
        """`schema` and `tables` of the training config, with the paths of the folder's vocabularies."""
        return artifact.read_mapping(self.folder)

    def parity(self) -> Mapping[str, Any]:
        """The content of `parity.json`."""
        parity: dict[str, Any] = json.loads((self.folder / artifact.PARITY).read_text(encoding="utf-8"))
        return parity

    def score(self, batch: Batch, context: KeyedJaggedTensor | None = None) -> torch.Tensor:
        """Logits float32 `[B]`, or `[B, T]` for several labels; queries `[B, D]` of a retriever. Does not read labels.

        A model with lists of times asks for the item at `batch.time`; without it, at the time of the newest item.

        Args:
            context: One row of features that all rows share, looked up once: some of `index.inputs.context`. The batch
                has the others.

        Raises:
            ValueError: Unknown features, a number that is not finite, or an id outside its table. Names feature and
                row.
        """
        inputs, shared = self.index.inputs, set() if context is None else set(context.keys())
        if not shared <= set(inputs.context or ()):
            raise ValueError(f"the model can share {list(inputs.context or ())} between rows, not {sorted(shared)}")
        sparse = self._checked(batch.sparse, [key for key in inputs.keys if key not in shared])
        if context is not None:
            context = self._checked(context, [key for key in inputs.keys if key in shared])
        dense = batch.dense
        if dense.dim() != 2 or dense.shape[1] != inputs.num_dense:
            raise ValueError(f"dense has shape {list(dense.shape)}; the model reads {inputs.num_dense} numbers per row")
        if not bool(dense.isfinite().all()):
            row, column = (~dense.isfinite()).nonzero()[0].tolist()
            raise ValueError(f"dense number {column} of row {row} is {float(dense[row, column])}; it must be finite")
        if not dense.shape[0] and inputs.query is not None:
            return torch.empty(0, inputs.query.dim)
        if not dense.shape[0]:
            return torch.empty((0,) if inputs.labels is None else (0, len(inputs.labels)))
        checked = replace(batch, dense=dense.float(), sparse=sparse)
        return self._run(arguments(checked, inputs, self.tables.data, context))

    def outputs(self, batch: Batch, context: KeyedJaggedTensor | None = None) -> dict[str, npt.NDArray[np.float32]]:
        """label → probabilities `[B]`, or predicted numbers. Arguments and errors as `score`."""
        answers = self.index.inputs.answers(self.score(batch, context)).T.contiguous().numpy()
        return dict(zip(self.labels, answers, strict=True))

    def _checked(self, sparse: KeyedJaggedTensor, keys: list[str]) -> KeyedJaggedTensor:
        """The features in the model's order, after checking that all ids are inside their tables."""
        if sparse.keys() != keys:
            missing = [key for key in keys if key not in sparse.index_per_key()]
            if missing:
                raise ValueError(
                    f"the batch has no feature {missing[0]!r}; the model reads {list(self.index.inputs.keys)}"
                )
            sparse = sparse.permute([sparse.index_per_key()[key] for key in keys])
        self._check_ids(sparse)
        weights = sparse.weights_or_none() if self.index.inputs.weighted else None
        if weights is not None and not bool(weights.isfinite().all()):
            raise ValueError("a weight of an id is not finite")
        return sparse


def _why_unfit(index: ExportIndex) -> str | None:
    """Why the compiled graph cannot run on this processor with this torch; None if it can, or does not exist."""
    current = artifact.versions_here()
    if "aoti" not in index.targets:
        return None
    if index.versions.get("torch") != current["torch"]:
        return f"compiled with torch {index.versions.get('torch')}, this is torch {current['torch']}"
    if index.march is None:
        return "compiled by an older rayrec, which did not record the processor"
    missing = processor.missing(index.instructions)
    return f"compiled for {index.march} processors, this one lacks {', '.join(missing)}" if missing else None
