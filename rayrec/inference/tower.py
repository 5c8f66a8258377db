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
from rayrec.models import hstu, sasrec
from rayrec.models.next_item import NextItem
from rayrec.models.retriever import batch_of
from rayrec.modules import EmbeddingConfig

MAKERS: dict[str, Callable[..., NextItem]] = {"sasrec": sasrec, "hstu": hstu}
FEATURE = "history"
TOWER, EXAMPLES, TOLERANCE = "tower.pt", 32, 1e-5


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
        table = EmbeddingConfig(num_embeddings=num_items, embedding_dim=dim, name="item", feature_names=[FEATURE])
        model = MAKERS[family]([table], 0, history=FEATURE, tables_device="cpu", **settings)
        return cls(family, settings, model)

    @torch.no_grad()
    def queries(self, histories: Sequence[Sequence[int]]) -> torch.Tensor:
        """`[Q, D]` for histories of rows, oldest first."""
        return self.model.eval().query(batch_of(FEATURE, histories))

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
