"""The query tower of a built-in next-item model: written beside its index, rebuilt from its settings without training
code of a run, and checked by the vectors that it gave when it was written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from rayrec.inference.artifact import ExportError
from rayrec.models.hstu import make_hstu
from rayrec.models.next_item import NextItem
from rayrec.models.retriever import History, ItemVectors
from rayrec.models.sasrec import make_sasrec
from rayrec.modules import EmbeddingConfig

MAKERS: dict[str, Callable[..., NextItem]] = {"sasrec": make_sasrec, "hstu": make_hstu}
TOWER, EXAMPLES, TOLERANCE = "tower.pt", 32, 1e-5


@dataclass(frozen=True, slots=True)
class Rows:
    """Histories as rows of the item table, in place of a `Batch`."""

    history: History

    @classmethod
    def of(cls, histories: Sequence[Sequence[int]]) -> Rows:
        offsets = torch.tensor([0, *(len(one) for one in histories)]).cumsum(0)
        return cls(History(torch.tensor([i for one in histories for i in one], dtype=torch.int64), offsets))


@dataclass(frozen=True, slots=True)
class Tower:
    """A model that turns histories into queries.

    Args:
        family: "sasrec" or "hstu"; without times.
        settings: what its maker got.
        model: in evaluation mode, on the CPU.
    """

    family: str
    settings: dict[str, Any]
    model: NextItem

    @classmethod
    def build(cls, family: str, settings: dict[str, Any], num_items: int, dim: int) -> Tower:
        """The model with its first weights.

        Raises:
            ExportError: no such family.
        """
        if family not in MAKERS:
            raise ExportError(f"there is no query tower {family!r}; there are {', '.join(MAKERS)}")
        table = EmbeddingConfig(num_embeddings=num_items, embedding_dim=dim, name="item", feature_names=["item"])
        model = MAKERS[family](ItemVectors(table, "cpu", 0), _history, **settings)
        return cls(family, settings, model)

    @torch.no_grad()
    def queries(self, histories: Sequence[Sequence[int]]) -> torch.Tensor:
        """`[Q, D]` for histories of rows, oldest first."""
        return self.model.eval().query(Rows.of(histories))  # type: ignore[arg-type]

    @torch.no_grad()
    def item_vectors(self) -> torch.Tensor:
        """`[I, D]`."""
        return self.model.eval().items(torch.arange(self.model.num_items))

    def write(self, folder: Path, seed: int = 0) -> None:
        """Weights, settings, and queries of drawn histories, by which `read` sees that it computes the same."""
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(0, 2 * self.model.max_length, (EXAMPLES,), generator=generator).tolist()
        drawn = [torch.randint(self.model.num_items, (size,), generator=generator).tolist() for size in sizes]
        saved = {
            "family": self.family,
            "settings": self.settings,
            "shape": [self.model.num_items, self.model.item_vectors.dim],
            "state": self.model.state_dict(),
            "histories": drawn,
            "queries": self.queries(drawn),
        }
        torch.save(saved, folder / TOWER)

    @classmethod
    def read(cls, folder: Path) -> Tower:
        """
        Raises:
            ExportError: damaged, or its queries are not those of the machine that wrote it.
        """
        try:
            saved = torch.load(folder / TOWER, weights_only=True)
            tower = cls.build(saved["family"], saved["settings"], *saved["shape"])
            tower.model.load_state_dict(saved["state"])
        except (OSError, RuntimeError, KeyError, TypeError, ValueError, UnpicklingError) as error:
            raise ExportError(f"{folder / TOWER} cannot be read ({error}): make the index anew") from error
        apart = float((tower.queries(saved["histories"]) - saved["queries"]).abs().max())
        if not apart <= TOLERANCE * max(1.0, float(saved["queries"].abs().max())):
            raise ExportError(f"{folder / TOWER}: queries are {apart:.2g} from those when it was written; index anew")
        return tower


def _history(rows: Any) -> History:
    history: History = rows.history
    return history
