"""The edge of a collection: features are checked, routed on the host and sent, maybe ahead of their step.

On a CPU all of it happens where a batch is started. For a GPU a host thread routes, which includes the exchange of
sizes; `send` then copies what was prepared to the device and starts the exchange of ids there. Nothing here reads a
number from the device, unless the features were made there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import numpy as np
import torch

from rayrec._runtime.numba_loops import loops
from rayrec.distributed.comm.awaitable import Awaitable
from rayrec.distributed.comm.trace import IDS, ROUTE, span
from rayrec.distributed.ids.batch import HostIds, Ids, Kept, RankIds, SentIds
from rayrec.distributed.ids.exchange import IdExchange
from rayrec.distributed.ids.sender import SPLIT_LOOPS
from rayrec.distributed.ids.upload import TrainedWeights, Upload
from rayrec.modules import BaseEmbeddingConfig
from rayrec.modules.embedding import feature_names, outside_rows, smallest_tables
from rayrec.sparse import KeyedJaggedTensor, ops
from rayrec.sparse.keyed_jagged_tensor import check_input

_ANY = torch.iinfo(torch.int64).max


class IdCheck:
    """Checks features, weights and ids of a batch against the tables that read them.

    Args:
        tables: of the collection.
        weighted: ids must carry weights.
        checked: features whose ids are compared with their tables' rows elsewhere.
    """

    def __init__(
        self, tables: Sequence[BaseEmbeddingConfig], weighted: bool, checked: Collection[str] = frozenset()
    ) -> None:
        self._weighted = weighted
        self._features = feature_names(tables)
        self._table_of = {name: table for name, table in smallest_tables(tables).items() if name not in checked}
        self._limits: dict[tuple[str, ...], np.ndarray] = {}
        self._loops = loops(SPLIT_LOOPS)

    def check(self, kjt: KeyedJaggedTensor) -> None:
        """Raises ValueError for a batch that cannot be looked up, with feature, id and table."""
        keys, values = tuple(kjt.keys()), kjt.values()
        check_input(kjt, () if keys in self._limits else self._features, self._weighted)
        if keys not in self._limits:
            rows = [self._table_of[key].num_embeddings if key in self._table_of else _ANY for key in keys]
            self._limits[keys] = np.array(rows, np.uint64)
        if values.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"ids are {values.dtype}; int64 or int32 is needed")
        lengths_KB = kjt.lengths().view(len(keys), kjt.stride())
        if lengths_KB.numel() and int(lengths_KB.min()) < 0:  # compiled loops count by them
            raise ValueError(f"the input has a length of {int(lengths_KB.min())}; lengths are 0 or more")
        total = int(lengths_KB.sum())
        if total != values.numel():
            raise ValueError(f"the input's lengths add up to {total}, but it has {values.numel()} ids")
        if not self._table_of:
            return
        ids = values.to(torch.int64).contiguous().numpy().view(np.uint64)
        if self._loops.any_outside(ids, np.array(kjt.offset_per_key()), self._limits[keys]):
            self._raise_for(kjt)

    def _raise_for(self, kjt: KeyedJaggedTensor) -> None:
        """Raises for the first id that is outside its table; nothing if there is none."""
        per_key = list(zip(kjt.keys(), kjt.values().split(kjt.length_per_key()), strict=True))
        for feature, table in self._table_of.items():
            for ids in (of_key for key, of_key in per_key if key == feature):
                if (error := outside_rows(feature, ids, table)) is not None:
                    raise error


class FeatureOrder:
    """Selects features of batches on the host; caches the places for each list of keys.

    Args:
        features: wanted, in order; a feature may come several times.
        weighted: ids carry weights.
    """

    def __init__(self, features: Sequence[str], weighted: bool) -> None:
        self._features, self._weighted = tuple(features), weighted
        self._orders: dict[tuple[str, ...], torch.Tensor | None] = {}

    def of(self, kjt: KeyedJaggedTensor) -> Ids:
        """The features' ids: lengths `[F, B]`, int64 values."""
        keys = tuple(kjt.keys())
        if keys not in self._orders:
            order = [kjt.index_per_key()[feature] for feature in self._features]
            in_order = order == list(range(len(keys)))
            self._orders[keys] = None if in_order else torch.tensor(order, dtype=torch.int32)
        order_F = self._orders[keys]
        weights = kjt.weights() if self._weighted else None
        lengths_FB, values = kjt.lengths().view(len(keys), kjt.stride()), kjt.values().to(torch.int64)
        if order_F is None:
            return Ids(lengths_FB, values, weights)
        if not self._features:
            return Ids(lengths_FB[:0], values[:0], None if weights is None else weights[:0])
        return Ids(*ops.permute_segments(order_F, lengths_FB, values, weights))


RoutedFeatures = tuple[KeyedJaggedTensor, tuple[int, ...], Kept]
"""The features that are sent, counts for every rank, and what stays on this one."""


class InputDist:
    """Starts batches, and keeps those that were begun before `forward` asks for them. Features are recognized by
    identity: the same object. All ranks start, send, wait, take and drop in the same order.

    Args:
        device: where tables lie.
        prepare: checks features on the host, and prepares them; on a GPU it runs in a thread, batch after batch.
        exchange: sends what `prepare` returned.
        updates: backward updates tables, so that gradients must not be scaled.
    """

    def __init__(
        self,
        device: torch.device,
        prepare: Callable[[KeyedJaggedTensor], RoutedFeatures],
        exchange: IdExchange,
        updates: bool,
    ) -> None:
        self.device, self._prepare, self.exchange, self._updates = device, prepare, exchange, updates
        self._ahead: list[PendingInput] = []

    def route(self, features: KeyedJaggedTensor, on_device: bool = False) -> HostIds:
        """Host work. After an error on this rank, waiting for the batch raises on every rank.

        Args:
            features: on the host.
            on_device: they lie on the device, too, which then splits them where it can.
        """
        with span(ROUTE):
            kept = Kept()
            try:
                kjt, counts, kept = self._prepare(features)
                splits = self.exchange.device_split if on_device and kjt is features else None
                counted = None if splits is None else splits.count(kjt)
                outgoing = self.exchange.sender.pack(kjt, counts, counted)
            except Exception as error:  # any error must reach the ranks that wait for this one
                outgoing = self.exchange.sender.pack_nothing(error)
            return self.exchange.announce(outgoing, kept)

    def begin(self, features: KeyedJaggedTensor) -> PendingInput:
        """Begins a batch that `take` will ask for."""
        self._ahead.append(PendingInput(self, features))
        return self._ahead[-1]

    def take(self, features: KeyedJaggedTensor) -> PendingInput:
        """What was begun for these features, each once and the oldest first, or else begun now.

        What was begun without gradients cannot train: it is dropped, and begun again.

        Raises:
            ValueError: gradients would be scaled.
        """
        kind = self.device.type
        scaled = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16
        if scaled and self._updates and torch.is_grad_enabled():
            raise ValueError(
                "float16 autocast needs a GradScaler, and the tables' optimizer inside backward would take its factor "
                "for a part of the gradient; use bfloat16, which needs none, or kernel 'dense', which leaves gradients "
                "to your optimizer"
            )
        for pending in self._ahead:
            if pending.features is features:
                self._ahead.remove(pending)
                if pending.trainable or not torch.is_grad_enabled():
                    return pending
                break
        return PendingInput(self, features)

    def drop(self, pending: PendingInput) -> bool:
        """Forgets what was begun; returns whether it had not been taken."""
        if pending not in self._ahead:
            return False
        self._ahead.remove(pending)
        return True

    def clear(self) -> None:
        """Forgets everything that was begun."""
        self._ahead = []


class PendingInput(Awaitable[RankIds]):
    """A batch under way. `trainable`: it was started with gradients enabled."""

    def __init__(self, way: InputDist, features: KeyedJaggedTensor) -> None:
        self.features, self.trainable = features, torch.is_grad_enabled()
        self._device, self._exchange = way.device, way.exchange
        self._sent: SentIds | None = None
        self._error: Exception | None = None
        if self._device.type == "cpu":
            self._sent = way.exchange.send(way.route(features), features)
            return
        self._upload: Upload[HostIds] | None = None
        self._event: torch.cuda.Event | None = None
        self._moved = torch.cuda.current_stream(self._device).record_event()  # the features may be on their way
        on_host, on_device, trained = features.on_host(), features.device().type != "cpu", None
        weights = features.weights_or_none()
        if weights is not None and weights.requires_grad:
            leaf = on_host.weights().detach().requires_grad_(self.trainable)
            on_host, trained = on_host.with_weights(leaf), TrainedWeights(weights, leaf)

        def prepare() -> Upload[HostIds]:
            with torch.set_grad_enabled(self.trainable):
                return Upload(way.route(on_host, on_device), trained)

        self._routed: Future[Upload[HostIds]] = _router().submit(prepare)

    def send(self) -> None:
        """Sends what is routed, once, on the current stream; an error is kept for `wait`."""
        if self._sent is not None or self._error is not None:
            return
        try:
            self._upload = self._routed.result()
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._moved)
            self._sent = self._exchange.send(self._upload.to(self._device), self.features)
            self.features.record_stream(stream)
            self._event = stream.record_event()
        except Exception as error:
            self._error = error

    def _wait_impl(self) -> RankIds:
        if self._device.type != "cpu":
            self._wait_on_device()
        assert self._sent is not None
        with span(IDS):
            return self._exchange.finish(self._sent)

    def _wait_on_device(self) -> None:
        self.send()
        if self._error is not None:
            raise self._error
        assert self._upload is not None and self._sent is not None and self._event is not None
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._event)
        for memory in (self._upload.on_device, self._sent.arrived):
            if memory is not None:  # taken from the pool of the stream that sent, read by this one until backward
                memory.record_stream(stream)


@cache
def _router() -> ThreadPoolExecutor:
    """One thread a process: batches of all collections are routed in the order in which they were started."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="rayrec-router")
