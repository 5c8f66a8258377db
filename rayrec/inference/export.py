"""`export`: a trained model to a folder that scores without training code, with the proof that it scores alike."""

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

from rayrec.data.mapping.vocabulary import load_vocabulary
from rayrec.inference import artifact, compiled, graph, processor
from rayrec.inference.artifact import ExportError, Index, scratch_beside
from rayrec.inference.graph import Inputs, same_with_context
from rayrec.inference.model import Model
from rayrec.inference.parity import SAMPLE_ROWS, Limits, Parity, Score, compare, parity_page
from rayrec.inference.tables import SomeRows, fill_some, write_tables
from rayrec.inference.wanted import AUTO, Wanted, choose_formats
from rayrec.models import Batch
from rayrec.quant import TableFormat, TablePlace, place_tables
from rayrec.quant.layout import TableConfig
from rayrec.storage.errors import first_line
from rayrec.storage.locations import local_path, open_filesystem, plain_path

if TYPE_CHECKING:
    from rayrec.checkpoint.reader import CheckpointWeights

_CHUNK_BYTES = 16 << 20
_SAMPLE_BYTES = 512 << 20  # of the rows that a sample reads of tables; equal ones count each time


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained model, wherever it comes from.

    Args:
        make_model: the model with its tables on "meta".
        weights: of the checkpoint.
        inputs: what the model reads.
        mapping: `schema` and `tables` of the training config, plain values.
        rows_of: feature → rows that its ids map to.
        batches: iterates over the evaluation rows; given a number, over about so many of them, drawn from all.
        recorded: the figures that the trainer recorded for this checkpoint and these rows, or None.
        logit_shift: added to logits; corrects for negatives that training left out.
        origin: run, checkpoint and step, written to the index.
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
    """What was written: the folder, its index, and the proof."""

    folder: Path
    index: Index
    parity: Parity


def export(trained: Trained, out: str | Path, wanted: Wanted | None = None) -> Export:
    """Writes the folder; it is there whole or not at all.

    Tables are read in blocks of rows: memory does not grow with them. They are read once, and the disk holds nothing
    beside the export; twice to choose formats, and to compare scores on all rows, for which their float32 rows are
    written beside it where its own are in another format.

    Args:
        out: must not exist.

    Raises:
        ExportError: the folder exists or cannot be written, the model cannot be traced or compiled, or, without
            `force`, its scores are outside their limits, or it is slow in a number format that is there for speed.
        ValueError: the checkpoint lacks a table or a parameter, or a number does not fit its format.
    """
    wanted, out = wanted or Wanted(), local_path(out)
    if out.exists():
        raise ExportError(f"{out} exists already: choose another folder, or remove it")
    wanted = wanted.check_machine()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with scratch_beside(out) as scratch:
            folder = scratch / "export"
            folder.mkdir()
            write_mapping(trained.mapping, folder)  # a vocabulary that cannot be read is found before tables are read
            made = _Exporting(trained, wanted, scratch).run(folder)
            folder.rename(out)
    except OSError as error:
        place = error.filename or out.parent
        raise ExportError(
            f"{out} was not written: {place}: {error.strerror or error}; check permissions and room (--parity all "
            "also takes that of the fp32 tables), or choose another folder"
        ) from error
    return Export(out, made.index, made.parity)


class _Exporting:
    """One export on its way.

    Args:
        scratch: a folder for what is not kept, on the file system of the result.
    """

    def __init__(self, trained: Trained, wanted: Wanted, scratch: Path) -> None:
        self.trained, self.wanted, self.scratch = trained, wanted, scratch
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

    def run(self, folder: Path) -> Export:
        all_rows, auto = self.wanted.parity is None, self.wanted.tables == AUTO
        sample, sampled = ([], False) if all_rows and not auto else self._sample()
        some = {table.name: SomeRows.of(table.num_embeddings, table.embedding_dim) for table in self.tables}
        score = self.float_score(some)
        for batch in sample:
            score(batch)  # notes which rows are read, whatever the model does with its ids
        if auto:
            fill_some(some, self.tables, self._read)
            formats = self._choose(some, sample)
        else:
            formats = {table.name: self.wanted.format_of(table.embedding_dim) for table in self.tables}
        places, crc = write_tables(folder / artifact.TABLES, self.tables, formats, self._read, None if auto else some)
        inputs, program = self._graph({place.table: place for place in places}, folder / artifact.TABLES)
        compiled.save_graph(program, folder / artifact.GRAPH)
        march = self.wanted.march
        if march is not None:
            compiled.compile_graph(program, folder / artifact.AOTI, march)
        index = Index(
            inputs=inputs,
            rows_of=dict(self.trained.rows_of),
            table_of=_smallest_tables(self.tables),
            places=places,
            logit_shift=self.trained.logit_shift,
            dense=self.wanted.dense,
            targets=["eager", "aoti"] if self.wanted.target == "aoti" else ["eager"],
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
            wanted = (table.num_embeddings, table.embedding_dim)
            found = saved.get(self.paths[table.name])
            if found is None or tuple(found) != wanted:
                has = "does not have it" if found is None else f"has it as {tuple(found)}"
                raise ExportError(
                    f"table {table.name!r} is {wanted} (rows, dim) in the model, but the checkpoint "
                    f"{self.trained.weights.path} {has}; export with the config of its run"
                )

    def _model(self) -> nn.Module:
        """The model with the checkpoint's dense part, its tables on "meta"."""
        model = self.trained.make_model()
        inside = tuple(f"{path}." for path in self.paths.values())
        own = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(inside)}
        for name, tensor in own.items():
            if name not in self.dense or self.dense[name].shape != tensor.shape:
                raise ExportError(
                    f"the checkpoint {self.trained.weights.path} has no parameter {name!r} of shape "
                    f"{tuple(tensor.shape)}; export with the config of its run"
                )
            tensor.copy_(self.dense[name])
        return model.eval()

    def _sample(self) -> tuple[list[Batch], bool]:
        """Rows to compare scores on, as many as may be held in memory with the rows of tables that they read; and
        whether they are not all there are."""
        most = self.wanted.parity or SAMPLE_ROWS
        dims = {feature: table.embedding_dim for table in self.tables for feature in table.feature_names}
        sample, rows, nbytes = list[Batch](), 0, 0
        for batch in self.trained.batches(most):
            if rows >= most or nbytes >= _SAMPLE_BYTES:
                return sample, True
            sample.append(batch)
            rows += batch.rows
            nbytes += sum(4 * dims.get(key, 0) * len(batch.sparse[key].values()) for key in batch.sparse.keys())
        return sample, False

    def _with_all_rows(self, folder: Path, formats: Mapping[str, TableFormat]) -> Score:
        """`float_score` with tables mapped from a file: the export's own where it holds them as they were trained."""
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
        """The model with these tables, by torch's own lookups: none of an export's. `after` is called after each."""
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
        """The function as a graph, with a row that all others share where the model allows it: one that looks at ids
        other than through its collections does not."""
        inputs = self.trained.inputs
        shared = replace(inputs, context=graph.pooled_keys(self.trained.make_model(), inputs.keys))
        plain = self.scoring(places, self.wanted.dense, inputs)
        if shared.context:
            scoring = self.scoring(places, self.wanted.dense, shared)
            try:
                program = graph.exported(scoring)
            except ValueError:
                return inputs, graph.exported(plain)
            if same_with_context(scoring, plain, artifact.map_tables(tables).data, self.trained.rows_of):
                return shared, program
        return inputs, graph.exported(plain)

    def scoring(self, places: Mapping[str, Any], dense: str, inputs: Inputs) -> graph.Scoring:
        """The function to be exported."""
        model = self._model()
        slots = graph.read_given_tables(model, places)
        if dense == "bf16":
            graph.with_bfloat16_layers(model)
        sequences = {one["name"]: tuple(one["ids"]) for one in self.trained.mapping["schema"].get("sequences", ())}
        return graph.Scoring(model, slots, inputs, self.trained.logit_shift, sequences)

    def _choose(self, some: Mapping[str, SomeRows], sample: Sequence[Batch]) -> dict[str, TableFormat]:
        def score_with(formats: Mapping[str, TableFormat]) -> Score:
            return self.float_score({name: some[name].quantized(format, name) for name, format in formats.items()})

        return choose_formats(self.tables, score_with, sample, self.trained.inputs, self.wanted.budget)

    def _parity(
        self,
        folder: Path,
        reference: Score,
        formats: Mapping[str, TableFormat],
        batches: Iterable[Batch],
        sampled: bool,
    ) -> Parity:
        model = Model(folder, target=self.wanted.target, checksums=False)
        model.tables.read_rows_alone()

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
            Limits.of(formats.values(), self.wanted.dense),
            {"fp32": floats, "tables": size},
            None if sampled else self.trained.recorded,
            sampled,
        )
        if parity.problems and not self.wanted.force:
            raise ExportError(
                f"the export's scores of {parity.rows:,} rows are outside its limits: "
                + "; ".join(parity.problems)
                + ". Take a wider --tables format, or keep it all the same with --force"
            )
        if parity.slow is not None and not self.wanted.force:
            raise ExportError(f"{parity.slow}. Take --dense fp32, or keep it all the same with --force")
        return parity


def _smallest_tables(tables: Iterable[TableConfig]) -> dict[str, str]:
    """Feature → the table with the fewest rows that reads it."""
    found: dict[str, TableConfig] = {}
    for table in tables:
        for feature in table.feature_names:
            if feature not in found or table.num_embeddings < found[feature].num_embeddings:
                found[feature] = table
    return {feature: table.name for feature, table in found.items()}


def write_mapping(mapping: Mapping[str, Any], folder: Path) -> None:
    """Schema and tables, with copies of the vocabularies: a folder that scores wherever it lies."""
    raw = json.loads(json.dumps(mapping))
    mappings = [feature.get("mapping") or {} for feature in raw["schema"].get("sparse", [])]
    for number, given in enumerate(one for one in mappings if one.get("kind") == "vocabulary"):
        copy = folder / artifact.VOCABULARIES / f"{number}{Path(plain_path(given['path'])).suffix}"
        copy.parent.mkdir(exist_ok=True)
        with open(copy, "wb") as file:
            file.writelines(_bytes_of(given["path"]))
        load_vocabulary(given["path"]).write(copy.with_name(f"{copy.name}.index"))
        given["path"] = copy.relative_to(folder).as_posix()
    artifact.write_json(folder / artifact.MAPPING, raw)


def _bytes_of(vocabulary: str) -> Iterator[bytes]:
    """A file's bytes, wherever it lies.

    Raises:
        ExportError: it cannot be read.
    """
    filesystem, inner = open_filesystem(vocabulary)
    try:
        with filesystem.open_input_stream(inner, compression=None) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise ExportError(
            f"the vocabulary {vocabulary} cannot be read: {first_line(error)}; put it back where the run's "
            "config names it: an export holds a copy"
        ) from error
