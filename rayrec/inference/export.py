"""`export`: writes a trained model to a folder that scores without training code, and compares the scores of both."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.export import ExportedProgram

from rayrec.data.mapping.vocabulary import index_beside, load_vocabulary
from rayrec.inference import artifact, compilation, graph, processor
from rayrec.inference.artifact import ExportError, ExportIndex, scratch_folder
from rayrec.inference.export_options import AUTO, ExportOptions, choose_formats
from rayrec.inference.graph import Inputs, same_with_context
from rayrec.inference.model import Model
from rayrec.inference.parity import SAMPLE_ROWS, Parity, ParityLimits, Score, compare, parity_page
from rayrec.inference.tables import PartialTable, fill_partial, write_tables
from rayrec.models import Batch
from rayrec.quant import TableFormat, TablePlace, place_tables
from rayrec.quant.layout import TableConfig
from rayrec.storage.errors import first_line
from rayrec.storage.locations import local_path, open_filesystem, plain_path

if TYPE_CHECKING:
    from rayrec.checkpoint.reader import CheckpointWeights

_CHUNK_BYTES = 16 << 20
_SAMPLE_BYTES = 512 << 20  # of the table rows that a sample reads; repeated rows count each time


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained model.

    Args:
        make_model: Creates the model with its tables on "meta".
        weights: Weights of the checkpoint.
        inputs: Inputs of the model.
        mapping: `schema` and `tables` of the training config, as plain values.
        rows_of: feature → rows that its ids map to.
        batches: Iterates over the evaluation rows; with a number, over a sample of about that many rows.
        recorded: Metrics that the trainer recorded for this checkpoint and these rows; None if it did not.
        logit_shift: Added to logits; corrects for negatives that training skipped.
        origin: Run, checkpoint and step, for the index.
    """

    make_model: Callable[[], nn.Module]
    weights: CheckpointWeights
    inputs: Inputs
    mapping: Mapping[str, Any]
    rows_of: Mapping[str, int]
    batches: Callable[[int | None], Iterable[Batch]]
    recorded: Mapping[str, Any] | None = None
    logit_shift: float = 0.0
    origin: Mapping[str, Any] = field(default_factory=dict)


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
            write_mapping(trained.mapping, folder)  # before the tables, so that an unreadable vocabulary fails early
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
        model = trained.make_model()
        self.paths = {
            config.name: graph.table_path(path, collection, config.name)
            for path, collection in graph.collections_in(model).items()
            for config in graph.configs_of(collection)
        }
        self.tables: list[TableConfig] = [
            config for collection in graph.collections_in(model).values() for config in graph.configs_of(collection)
        ]
        self._check_tables()
        self.dense = trained.weights.dense()
        self.bf16: frozenset[str] = frozenset()  # names of the dense parameters that become bfloat16

    def run(self, folder: Path) -> Export:
        all_rows, auto = self.options.parity is None, self.options.tables == AUTO
        sample, sampled = ([], False) if all_rows and not auto else self._sample()
        partial_tables = {
            table.name: PartialTable.of(table.num_embeddings, table.embedding_dim) for table in self.tables
        }
        score = self.float_score(partial_tables)
        for batch in sample:
            score(batch)  # records which rows the model reads
        if auto:
            fill_partial(partial_tables, self.tables, self._read)
            formats = self._choose(partial_tables, sample)
        else:
            formats = {table.name: self.options.format_of(table.embedding_dim) for table in self.tables}
        places, crc = write_tables(
            folder / artifact.TABLES, self.tables, formats, self._read, None if auto else partial_tables
        )
        inputs, program = self._graph({place.table: place for place in places}, folder / artifact.TABLES)
        compilation.save_graph(program, folder / artifact.GRAPH)
        march = self.options.march
        if march is not None:
            compilation.compile_graph(program, folder / artifact.AOTI, march)
        sizes = self._dense_sizes()
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
            version=f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}",
            versions=artifact.versions_here(),
            origin=dict(self.trained.origin),
            files={},
            march=march,
            instructions=[] if march is None else processor.instructions_of(march),
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

    def _read(self, table: str, start: int, stop: int) -> torch.Tensor:
        return self.trained.weights.read_rows(self.paths[table], start, stop)

    def _check_tables(self) -> None:
        saved = self.trained.weights.tables()
        for table in self.tables:
            shape = (table.num_embeddings, table.embedding_dim)
            saved_shape = saved.get(self.paths[table.name])
            if saved_shape is None or tuple(saved_shape) != shape:
                problem = "does not have it" if saved_shape is None else f"has {tuple(saved_shape)}"
                raise ExportError(
                    f"table {table.name!r} has (rows, dim) {shape} in the model, but the checkpoint "
                    f"{self.trained.weights.path} {problem}; export with the config of its run"
                )

    def _model(self) -> nn.Module:
        """The model with the checkpoint's dense parameters, and its tables on "meta"."""
        model = self.trained.make_model()
        table_prefixes = tuple(f"{path}." for path in self.paths.values())
        state = {name: x for name, x in model.state_dict().items() if not name.startswith(table_prefixes)}
        for name, tensor in state.items():
            if name not in self.dense or self.dense[name].shape != tensor.shape:
                raise ExportError(
                    f"the checkpoint {self.trained.weights.path} has no parameter {name!r} of shape "
                    f"{tuple(tensor.shape)}; export with the config of its run"
                )
            tensor.copy_(self.dense[name])
        return model.eval()

    def _dense_sizes(self) -> dict[str, int]:
        """Numbers in each dense parameter."""
        table_prefixes = tuple(f"{path}." for path in self.paths.values())
        parameters = self.trained.make_model().named_parameters()
        return {name: x.numel() for name, x in parameters if not name.startswith(table_prefixes)}

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
            write_tables(path, self.tables, floats, self._read)
        mapped = artifact.map_tables(path)
        weights = {
            place.table: nn.Parameter(
                mapped.data[place.begin : place.end].view(torch.float32).view(place.rows, place.dim),
                requires_grad=False,
            )
            for place in place_tables(self.tables, floats)[0]
        }
        return self.float_score(weights, mapped.release)

    def float_score(self, weights: Mapping[str, nn.Parameter], after: Callable[[], None] | None = None) -> Score:
        """Scores with the model itself and torch's lookups, to compare an export with.

        Args:
            weights: Tables by name.
            after: Called after each batch.
        """
        model = self._model()
        for table, path in self.paths.items():
            model.get_submodule(path).register_parameter("weight", weights[table])

        def score(batch: Batch) -> torch.Tensor:
            with torch.no_grad():
                _, logits = model(batch)
            if after is not None:
                after()
            shifted: torch.Tensor = logits + self.trained.logit_shift
            return shifted

        return score

    def _graph(self, places: Mapping[str, TablePlace], tables: Path) -> tuple[Inputs, ExportedProgram]:
        """Exports the graph; with a context row, unless the model reads ids other than through its collections."""
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
        model = self._model()
        slots = graph.replace_collections(model, places)
        sequences = {spec["name"]: tuple(spec["ids"]) for spec in self.trained.mapping["schema"].get("sequences", ())}
        return graph.Scoring(model, slots, inputs, self.trained.logit_shift, sequences)

    def _choose(self, partial_tables: Mapping[str, PartialTable], sample: Sequence[Batch]) -> dict[str, TableFormat]:
        def score_with(formats: Mapping[str, TableFormat]) -> Score:
            return self.float_score(
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
            logits = model.score(batch)
            model.tables.release()
            return logits

        floats = sum(4 * table.num_embeddings * table.embedding_dim for table in self.tables)
        size = (folder / artifact.TABLES).stat().st_size
        parity = compare(
            reference,
            score,
            batches,
            self.trained.inputs,
            ParityLimits.of(formats.values(), self.options.dense),
            {"fp32": floats, "tables": size},
            None if sampled else self.trained.recorded,
            sampled,
        )
        if parity.problems and not self.options.force:
            raise ExportError(
                f"the export's scores of {parity.rows:,} rows are outside the limits: "
                + "; ".join(parity.problems)
                + ". Choose a wider --tables format, or keep the export with --force"
            )
        if parity.slow is not None and not self.options.force:
            raise ExportError(f"{parity.slow}. Use --dense fp32, or keep the export with --force")
        return parity


def _smallest_tables(tables: Iterable[TableConfig]) -> dict[str, str]:
    """Feature → the table with the fewest rows that reads it."""
    smallest: dict[str, TableConfig] = {}
    for table in tables:
        for feature in table.feature_names:
            if feature not in smallest or table.num_embeddings < smallest[feature].num_embeddings:
                smallest[feature] = table
    return {feature: table.name for feature, table in smallest.items()}


def write_mapping(mapping: Mapping[str, Any], folder: Path) -> None:
    """Writes schema and tables, and copies the vocabularies, so that the folder does not depend on other files."""
    raw = json.loads(json.dumps(mapping))
    mappings = [feature.get("mapping") or {} for feature in raw["schema"].get("sparse", [])]
    for number, vocabulary in enumerate(spec for spec in mappings if spec.get("kind") == "vocabulary"):
        copy = folder / artifact.VOCABULARIES / f"{number}{Path(plain_path(vocabulary['path'])).suffix}"
        copy.parent.mkdir(exist_ok=True)
        with open(copy, "wb") as file:
            file.writelines(_bytes_of(vocabulary["path"]))
        load_vocabulary(vocabulary["path"]).write(index_beside(str(copy)))
        vocabulary["path"] = copy.relative_to(folder).as_posix()
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
