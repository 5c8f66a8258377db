"""The sharded embedding collection, its sharder, and the default sharders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rayrec.distributed.collections.embedding_bag import EmbeddingBagCollectionSharder
from rayrec.distributed.collections.sharded_collection import ShardedCollection
from rayrec.distributed.collections.sharder import CollectionSharder
from rayrec.distributed.comm.awaitable import Deferred
from rayrec.distributed.executors.replicated import ReplicatedExecutor
from rayrec.distributed.executors.sequences import SequencesExecutor
from rayrec.distributed.executors.setup import Setup, ShardedExecutor
from rayrec.distributed.ids.routes import make_outputs
from rayrec.distributed.ids.upload import OnHost
from rayrec.distributed.plan.module_sharder import ModuleSharder
from rayrec.modules import EmbeddingCollection, EmbeddingConfig
from rayrec.modules.embedding import output_names
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor


@dataclass(frozen=True)
class Features:
    """Input data for the output: lengths of all examples, key-major, and the ids if the output holds them."""

    kjt: OnHost[KeyedJaggedTensor]
    lengths: torch.Tensor
    values: torch.Tensor | None


@dataclass(frozen=True)
class _Output:
    """One feature read by one table: its vectors are block number `block` of the looked-up vectors."""

    name: str
    feature: str
    block: int


class EmbeddingCollectionAwaitable(Deferred[dict[str, JaggedTensor]]):
    """Vectors in transit. Waits when it is used as a dict."""

    result_type = dict


class ShardedEmbeddingCollection(ShardedCollection[dict[str, JaggedTensor]]):
    """A sharded `EmbeddingCollection`: for each feature the vectors of this rank's ids, `values [N, D]` with the
    feature's lengths. See `ShardedCollection`."""

    tables_attribute = "embeddings"
    awaitable = EmbeddingCollectionAwaitable
    embeddings: nn.ModuleDict

    def __init__(
        self,
        module: EmbeddingCollection,
        setup: Setup[EmbeddingConfig],
        sharded: ShardedExecutor,
        replicated: ReplicatedExecutor[EmbeddingConfig] | None,
    ) -> None:
        super().__init__(module, setup, sharded, replicated)
        self._configs, self._need_indices = tuple(setup.configs), module.need_indices()
        names = [name for table_names in output_names(self._configs) for name in table_names]
        self._features = [[output.feature for output in outputs] for outputs in self.blocks]  # of each tensor
        outputs = [(output.table, output.feature) for outputs in self.blocks for output in outputs]
        block = {output: number for number, output in enumerate(outputs)}
        self._outputs = [
            _Output(name, output.feature, block[output.table, output.feature])
            for name, output in zip(names, make_outputs(self._configs), strict=True)
        ]

    def _input(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Features]:
        values = features.values() if self._need_indices else None
        return _as_one_example(features), Features(OnHost(features), features.lengths(), values)

    def _result(self, tensors: list[torch.Tensor], collection_data: Features) -> dict[str, JaggedTensor]:
        features, kjt = collection_data, collection_data.kjt.item
        index, counts = kjt.index_per_key(), kjt.length_per_key()
        sizes = [[counts[index[feature]] for feature in names] for names in self._features]
        blocks = _Split.apply(sizes, *tensors)
        lengths = features.lengths.view(-1).split(kjt.stride_per_key())
        ids = None if features.values is None else features.values.split(counts)
        return {
            output.name: JaggedTensor(
                values=blocks[output.block],
                weights=None if ids is None else ids[index[output.feature]],
                lengths=lengths[index[output.feature]],
            )
            for output in self._outputs
        }

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return list(self._configs)

    def embedding_dim(self) -> int:
        return self._configs[0].embedding_dim

    def need_indices(self) -> bool:
        return self._need_indices


class _Split(torch.autograd.Function):
    """Splits tensors into blocks of rows.

    Backward passes on the gradients of all tensors at once. So all ranks exchange gradients in the same order, whatever
    a loss reads first and whether it reads every tensor.
    """

    @staticmethod
    def forward(ctx: Any, sizes: list[list[int]], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.sizes = sizes
        return tuple(block for tensor, rows in zip(tensors, sizes, strict=True) for block in tensor.split(rows))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        blocks = iter(grads)
        return None, *(torch.cat([next(blocks) for _ in sizes]) for sizes in ctx.sizes)


def _as_one_example(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """All ids of a feature in one list: lookups id by id do not depend on the examples."""
    if kjt.variable_stride_per_key():
        lengths = torch.tensor(kjt.length_per_key(), dtype=torch.int64, device=kjt.device())
    else:
        lengths = kjt.lengths().view(len(kjt.keys()), kjt.stride()).sum(1)
    return KeyedJaggedTensor(kjt.keys(), kjt.values(), lengths=lengths, stride=1)


class EmbeddingCollectionSharder(CollectionSharder[EmbeddingCollection, ShardedEmbeddingCollection]):
    """Shards an `EmbeddingCollection`. See `CollectionSharder` for its settings.

    `dedup` pays if ids repeat often, as in histories.
    """

    module_type, sharded_type = EmbeddingCollection, ShardedEmbeddingCollection

    def _executor(self, setup: Setup[EmbeddingConfig], num_counts: int) -> ShardedExecutor:
        return SequencesExecutor(setup, num_counts)


def default_sharders() -> list[ModuleSharder[Any]]:
    """The sharders used by default: one per kind of collection. Tables without
    `apply_optimizer_in_backward` are not trained."""
    return [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
