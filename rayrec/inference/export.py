"""`export`: writes a trained model to a folder that scores without training code, and compares the scores of both."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from rayrec.data import Schema
from rayrec.data.mapping.derived.joins import write_entities
from rayrec.data.mapping.vocabulary import index_beside, load_vocabulary
from rayrec.dynamic_ids import IdMap
from rayrec.dynamic_ids import export as export_ids
from rayrec.inference import artifact, calibration, compilation, graph, processor
from rayrec.inference.artifact import ExportError, ExportIndex, scratch_folder
from rayrec.inference.calibration import Calibration
from rayrec.inference.checkpoint_model import CheckpointModel, Trained
from rayrec.inference.export_options import AUTO, ExportOptions, choose_formats
from rayrec.inference.graph import Inputs, same_with_context
from rayrec.inference.model import Model
from rayrec.inference.parity import (
    PARITY_ITEMS,
    SAMPLE_ROWS,
    Parity,
    ParityLimits,
    Score,
    compare,
    compare_queries,
    parity_page,
)
from rayrec.inference.protocol_inputs import inputs_of
from rayrec.inference.tables import PartialTable, fill_partial, write_tables
from rayrec.models import Batch, Retriever
from rayrec.quant import TableFormat, TablePlace, place_tables
from rayrec.quant.layout import TableConfig
from rayrec.storage.errors import first_line
from rayrec.storage.locations import local_path, open_filesystem, plain_path

_CHUNK_BYTES = 16 << 20
_SAMPLE_BYTES = 512 << 20  # of the table rows that a sample reads; repeated rows count each time


@dataclass(frozen=True, slots=True)
class Export:
    """A written export."""

    folder: Path
    index: ExportIndex
    parity: Parity


def export(trained: Trained, out: str | Path, options: ExportOptions | None = None) -> Export:
    """Writes an export. The folder appears complete, or not at all.

    Tables are read in blocks of rows, so memory does not grow with them. They are read once; and a second time with
    `tables="AUTO"`, and with `parity=None`, which also needs disk space for fp32 tables if the export has another
    format.

    Args:
        out: Folder to create; must not exist.

    Raises:
        ExportError: The folder exists or cannot be written, or the model cannot be traced or compiled. Without `force`:
            the scores are outside their limits, or a number format meant for speed is slow.
        ValueError: The checkpoint lacks a table or a parameter, or a number does not fit its format.
    """
    options, out = options or ExportOptions(), local_path(out)
    if out.exists():
        raise ExportError(f"{out} already exists: choose another folder, or remove it")
    options = options.check_machine()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(out) as scratch:
            folder = scratch / "export"
            folder.mkdir()
            # Before the tables, so that an unreadable vocabulary fails early.
            write_mapping(trained.mapping, folder, trained.ids)
            written = _Exporter(trained, options, scratch).run(folder)
            folder.rename(out)
    except OSError as error:
        path = error.filename or out.parent
        raise ExportError(
            f"{out} was not written: {path}: {error.strerror or error}; check permissions and disk space (--parity all "
            "also needs space for fp32 tables), or choose another folder"
        ) from error
    return Export(out, written.index, written.parity)


class _Exporter:
    """Writes one export.

    Args:
        scratch: Folder for temporary files, on the file system of the result.
    """

    def __init__(self, trained: Trained, options: ExportOptions, scratch: Path) -> None:
        self.trained, self.options, self.scratch = trained, options, scratch
        self.model = CheckpointModel(trained)
        self.calibration: Calibration | None = None
        self.calibrated: dict[str, dict[str, float | None]] | None = None  # metrics before and after
        if options.calibrate is not None and trained.inputs.query is not None:
            raise ExportError("--calibrate: a retriever has no probabilities; leave it out")
        if options.tables == AUTO and trained.inputs.query is not None:
            raise ExportError(
                "--tables AUTO: a format is chosen by the log loss of labels, and a retriever has none; choose fp32, "
                "fp16, int8 or int4"
            )
        keys = set(trained.inputs.keys)
        # A retriever's query does not read all tables.
        self.tables = [table for table in self.model.tables if keys & set(table.feature_names)]
        self.bf16: frozenset[str] = frozenset()  # names of the dense parameters that become bfloat16

    def run(self, folder: Path) -> Export:
        all_rows, auto = self.options.parity is None, self.options.tables == AUTO
        calibrate = self.options.calibrate
        sample, sampled = ([], False) if all_rows and not auto and calibrate is None else self._sample()
        partial_tables = self.model.partial_tables()
        score = self.model.score(partial_tables)
        for batch in sample:
            score(batch)  # records which rows the model reads
        if auto:
            fill_partial(partial_tables, self.tables, self.model.read)
            formats = self._choose(partial_tables, sample)
        else:
            formats = {table.name: self.options.format_of(table.embedding_dim) for table in self.tables}
        places, crc = write_tables(
            folder / artifact.TABLES, self.tables, formats, self.model.read, None if auto else partial_tables
        )
        if calibrate is not None:
            self._calibrate(calibrate, score, sample)
        inputs, program = self._graph({place.table: place for place in places}, folder / artifact.TABLES)
        compilation.save_graph(program, folder / artifact.GRAPH)
        march = self.options.march
        if march is not None:
            compilation.compile_graph(program, folder / artifact.AOTI, march)
        sizes = self.model.dense_sizes()
        index = ExportIndex(
            inputs=inputs,
            rows_of=dict(self.trained.rows_of),
            table_of=_smallest_tables(self.tables),
            places=places,
            logit_shift=self.trained.logit_shift,
            dense=self.options.dense,
            dense_parameters=sum(sizes.values()),
            bf16_parameters=sum(sizes[name] for name in self.bf16),
            targets=["eager", "aoti"] if self.options.target == "aoti" else ["eager"],
            version=artifact.new_version(),
            versions=artifact.versions_here(),
            origin=dict(self.trained.origin),
            files={},
            march=march,
            instructions=[] if march is None else processor.instructions_of(march),
            calibration=calibrate,
        )
        artifact.write_json(folder / artifact.INDEX, index.to_dict())
        reference = self._with_all_rows(folder, formats) if all_rows else score
        batches = self.trained.batches(None) if all_rows else sample
        parity = self._parity(folder, reference, formats, batches, sampled and not all_rows)
        artifact.write_json(folder / artifact.PARITY, parity.to_dict())
        (folder / artifact.PARITY_PAGE).write_text(parity_page(parity, index.to_dict()), encoding="utf-8")
        index.files.update(artifact.listed_files(folder, {artifact.TABLES: crc}))
        artifact.write_json(folder / artifact.INDEX, index.to_dict())
        return Export(folder, index, parity)

    def _sample(self) -> tuple[list[Batch], bool]:
        """Rows to compare scores on, limited by the bytes of the table rows that they read; whether there are more."""
        max_rows = self.options.parity or SAMPLE_ROWS
        dims = {feature: table.embedding_dim for table in self.tables for feature in table.feature_names}
        sample, rows, nbytes = list[Batch](), 0, 0
        for batch in self.trained.batches(max_rows):
            if rows >= max_rows or nbytes >= _SAMPLE_BYTES:
                return sample, True
            sample.append(batch)
            rows += batch.rows
            nbytes += sum(4 * dims.get(key, 0) * len(batch.sparse[key].values()) for key in batch.sparse.keys())
        return sample, False

    def _with_all_rows(self, folder: Path, formats: Mapping[str, TableFormat]) -> Score:
        """`float_score` with fp32 tables mapped from a file: the export's, or else a temporary one."""
        path = folder / artifact.TABLES
        floats = dict.fromkeys(formats, TableFormat.FP32)
        if formats != floats:
            path = self.scratch / "trained"
            write_tables(path, self.tables, floats, self.model.read)
        mapped = artifact.map_tables(path)
        weights = {
            place.table: nn.Parameter(
                mapped.data[place.begin : place.end].view(torch.float32).view(place.rows, place.dim),
                requires_grad=False,
            )
            for place in place_tables(self.tables, floats)[0]
        }
        return self.model.score({**self.model.partial_tables(), **weights}, mapped.release)

    def _graph(self, places: Mapping[str, TablePlace], tables: Path) -> tuple[Inputs, ExportedProgram]:
        """Exports the graph; with a context row, unless the model reads ids other than through its collections."""
        inputs, program = self._graph_and_inputs(places, tables)
        if inputs.query is not None:
            inputs = replace(inputs, query=replace(inputs.query, dim=graph.output_width(program)))
        return inputs, program

    def _graph_and_inputs(self, places: Mapping[str, TablePlace], tables: Path) -> tuple[Inputs, ExportedProgram]:
        inputs = self.trained.inputs
        shared = replace(inputs, context=graph.pooled_keys(self.trained.make_model(), inputs.keys))
        plain = self.scoring(places, inputs)
        if self.options.dense == "bf16":
            self.bf16 = graph.matrix_parameters(plain)
            if not self.bf16:
                raise ExportError("--dense bf16: the model multiplies no parameters that could be bf16; use fp32")
            graph.use_bfloat16(plain, self.bf16)
        if shared.context:
            scoring = self.scoring(places, shared)
            if self.bf16:
                graph.use_bfloat16(scoring, self.bf16)
            try:
                program = graph.to_graph(scoring)
            except ValueError:
                return inputs, graph.to_graph(plain)
            if same_with_context(scoring, plain, artifact.map_tables(tables).data, self.trained.rows_of):
                return shared, program
        return inputs, graph.to_graph(plain)

    def scoring(self, places: Mapping[str, Any], inputs: Inputs) -> graph.Scoring:
        """The function to export, in fp32."""
        model = self.model.module()
        slots = graph.replace_collections(model, places)
        sequences = {spec["name"]: tuple(spec["ids"]) for spec in self.trained.mapping["schema"].get("sequences", ())}
        return graph.Scoring(model, slots, inputs, self.trained.logit_shift, sequences, self.calibration)

    def _calibrate(self, kind: str, score: Score, sample: Sequence[Batch]) -> None:
        """
        Raises:
            ExportError: The sample has no rows.
            ValueError: A label cannot be calibrated on the sample.
        """
        inputs = self.trained.inputs
        rows = [(score(batch), batch.label, batch.weight) for batch in sample if batch.rows]
        if not rows:
            raise ExportError("--calibrate: the evaluation data has no rows; give rows with --data")
        names = inputs.labels or ("label",)
        binary = [kind == "binary" for kind in inputs.kinds or ["binary"] * len(names)]
        self.calibration, self.calibrated = calibration.calibrated(kind, rows, names, binary)

    def _choose(self, partial_tables: Mapping[str, PartialTable], sample: Sequence[Batch]) -> dict[str, TableFormat]:
        def score_with(formats: Mapping[str, TableFormat]) -> Score:
            return self.model.score(
                {name: partial_tables[name].quantized(format, name) for name, format in formats.items()}
            )

        return choose_formats(self.tables, score_with, sample, self.trained.inputs, self.options.budget)

    def _parity(
        self,
        folder: Path,
        reference: Score,
        formats: Mapping[str, TableFormat],
        batches: Iterable[Batch],
        sampled: bool,
    ) -> Parity:
        model = Model(folder, target=self.options.target, checksums=False)
        model.tables.disable_readahead()

        def score(batch: Batch) -> torch.Tensor:
            output = model.score(batch)
            model.tables.release()
            return output

        limits = ParityLimits.of(formats.values(), self.options.dense, self.trained.inputs.query is not None)
        floats = sum(4 * table.num_embeddings * table.embedding_dim for table in self.tables)
        size = (folder / artifact.TABLES).stat().st_size
        nbytes = {"fp32": floats, "tables": size}
        if self.trained.inputs.query is not None:
            parity = compare_queries(reference, score, batches, self._some_items(), limits, nbytes, sampled)
        else:
            recorded = None if sampled or self.calibration is not None else self.trained.recorded
            trained = reference if self.calibration is None else _mapped(reference, self.calibration)
            parity = compare(trained, score, batches, self.trained.inputs, limits, nbytes, recorded, sampled)
            parity = replace(parity, calibration=self.calibrated)
        if parity.problems and not self.options.force:
            outputs = "scores" if self.trained.inputs.query is None else "queries"
            raise ExportError(
                f"the export's {outputs} of {parity.rows:,} rows are outside the limits: "
                + "; ".join(parity.problems)
                + ". Choose a wider --tables format, or keep the export with --force"
            )
        if parity.slow is not None and not self.options.force:
            raise ExportError(f"{parity.slow}. Use --dense fp32, or keep the export with --force")
        return parity

    def _some_items(self) -> torch.Tensor:
        """Vectors `[n, D]` of at most `PARITY_ITEMS` random items, of the trained model."""
        module = self.trained.make_model()
        assert isinstance(module, Retriever)
        rows = torch.randperm(module.num_items, generator=torch.Generator().manual_seed(0))[:PARITY_ITEMS]
        return torch.cat([vectors for _, vectors in self.model.item_vectors(rows)])


def _mapped(score: Score, calibration: Calibration) -> Score:
    """The calibrated scores."""
    return lambda batch: calibration(score(batch))


def _smallest_tables(tables: Iterable[TableConfig]) -> dict[str, str]:
    """Feature → the table with the fewest rows that reads it."""
    smallest: dict[str, TableConfig] = {}
    for table in tables:
        for feature in table.feature_names:
            if feature not in smallest or table.num_embeddings < smallest[feature].num_embeddings:
                smallest[feature] = table
    return {feature: table.name for feature, table in smallest.items()}


def write_mapping(mapping: Mapping[str, Any], folder: Path, ids: Mapping[str, IdMap] | None = None) -> None:
    """Writes schema and tables, with all files that they name: vocabularies, entities, events, rows of dynamic ids; and
    the inputs of the open inference protocol."""
    raw = json.loads(json.dumps(mapping))
    raw["inputs"] = inputs_of(Schema.model_validate(raw["schema"]))
    mappings = [feature.get("mapping") or {} for feature in raw["schema"].get("sparse", [])]
    for number, vocabulary in enumerate(spec for spec in mappings if spec.get("kind") == "vocabulary"):
        copy = folder / artifact.VOCABULARIES / f"{number}{Path(plain_path(vocabulary['path'])).suffix}"
        copy.parent.mkdir(exist_ok=True)
        with open(copy, "wb") as file:
            file.writelines(_bytes_of(vocabulary["path"]))
        load_vocabulary(vocabulary["path"]).write(index_beside(str(copy)))
        vocabulary["path"] = copy.relative_to(folder).as_posix()
    write_entities(raw["schema"].get("derived", []), folder)
    written = dict[int, str]()  # features of a table share a map
    for feature in raw["schema"].get("sparse", []):
        own = (ids or {}).get(feature["name"])
        if own is not None:
            if id(own) not in written:
                written[id(own)] = f"{artifact.IDS}/{len(written)}.bin"
                (folder / artifact.IDS).mkdir(exist_ok=True)
                export_ids(own, folder / written[id(own)])
            feature["mapping"]["path"] = written[id(own)]
    artifact.write_json(folder / artifact.MAPPING, raw)


def _bytes_of(vocabulary: str) -> Iterator[bytes]:
    """The bytes of a file on any file system.

    Raises:
        ExportError: The file cannot be read.
    """
    filesystem, inner = open_filesystem(vocabulary)
    try:
        with filesystem.open_input_stream(inner, compression=None) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise ExportError(
            f"the vocabulary {vocabulary} cannot be read: {first_line(error)}; restore it at the path in the run's "
            "config: an export needs a copy"
        ) from error
