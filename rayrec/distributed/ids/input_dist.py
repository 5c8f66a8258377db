"""The input side of a collection: checks features, routes them on the host and sends them, maybe ahead of their step.

On a CPU a batch is checked, routed and sent when it is started. For a GPU a host thread checks and routes, which
includes the exchange of sizes; `send` then copies the result to the device and starts the exchange of ids there. The
host reads no number from the device, unless the features were made there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import accumulate

import numpy as np
import torch

from rayrec._runtime.numba_loops import loops
from rayrec.distributed.comm.awaitable import Awaitable
from rayrec.distributed.comm.trace import IDS, ROUTE, span
from rayrec.distributed.ids.batch import HostIds, Ids, Kept, OutgoingIds, RankIds, SentIds
from rayrec.distributed.ids.exchange import IdExchange
from rayrec.distributed.ids.sender import SPLIT_LOOPS
from rayrec.distributed.ids.upload import OnHost, TrainedWeights, Upload
from rayrec.modules.configs import BaseEmbeddingConfig
from rayrec.modules.embedding import feature_names, outside_rows, smallest_tables
from rayrec.sparse import KeyedJaggedTensor, ops
from rayrec.sparse.keyed_jagged_tensor import check_input

_UNCHECKED = torch.iinfo(torch.int64).max


class IdCheck:
    """Checks features, weights and ids of a batch against the tables that read them.

    Args:
        tables: tables of the collection.
        weighted: whether ids must carry weights.
        checked: features whose ids the split compares with their tables' rows.
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
        if keys not in self._limits:
            check_input(kjt, self._features)
            tables = [self._table_of.get(key) for key in keys]
            rows = [_UNCHECKED if table is None else table.num_embeddings for table in tables]
            self._limits[keys] = np.array(rows, np.uint64)
        if self._weighted:
            check_input(kjt, (), weighted=True)
        if values.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"ids are {values.dtype}; int64 or int32 is needed")
        lengths = kjt.lengths().view(len(keys), kjt.stride()).contiguous()
        lengths_KB = (lengths if lengths.dtype is torch.int32 else lengths.to(torch.int64)).numpy()
        totals, ids = np.empty(len(keys), np.int64), values.to(torch.int64).contiguous().numpy().view(np.uint64)
        found = self._loops.CHECKS[lengths_KB.dtype](lengths_KB, self._limits[keys], ids, totals)
        if found < 0:  # compiled loops index by lengths
            raise ValueError(f"the input has a length of {lengths_KB.min()}; lengths are 0 or more")
        cached, counts = kjt.length_per_key_or_none(), totals.tolist()
        if sum(counts) != values.numel():
            raise ValueError(f"the input's lengths add up to {sum(counts)}, but it has {values.numel()} ids")
        offsets = kjt.offset_per_key_or_none()
        # Loops index by lengths into arrays of the cached sizes.
        if (cached is not None and counts != cached) or (offsets is not None and offsets != [0, *accumulate(counts)]):
            raise ValueError(
                f"the lengths of features {list(keys)} add up to {counts}, but length_per_key is {cached} and "
                f"offset_per_key is {offsets}: they belong to other lengths; make a new KeyedJaggedTensor"
            )
        if found > 0:
            self._raise_for(kjt)

    def _raise_for(self, kjt: KeyedJaggedTensor) -> None:
        """Raises for the first id that is outside its table."""
        ids_of_keys = list(zip(kjt.keys(), kjt.values().split(kjt.length_per_key()), strict=True))
        for feature, table in self._table_of.items():
            for key, ids in ids_of_keys:
                if key == feature and (error := outside_rows(feature, ids, table)) is not None:
                    raise error


class FeatureOrder:
    """Selects features of batches; caches the order for each list of keys.

    Args:
        features: features to select, in order; a feature may come several times.
        weighted: whether ids carry weights.
        device: device of the batches.
    """

    def __init__(self, features: Sequence[str], weighted: bool, device: torch.device | None = None) -> None:
        self._features, self._weighted, self._device = tuple(features), weighted, device
        self._orders: dict[tuple[str, ...], torch.Tensor | None] = {}

    def of(self, kjt: KeyedJaggedTensor, num_ids: int | None = None) -> Ids:
        """The features' ids: lengths `[F, B]`, int64 values.

        Args:
            num_ids: their number; without it the host waits for a GPU.
        """
        keys = tuple(kjt.keys())
        if keys not in self._orders:
            order = [kjt.index_per_key()[feature] for feature in self._features]
            in_order = order == list(range(len(keys)))
            self._orders[keys] = None if in_order else torch.tensor(order, dtype=torch.int32).to(self._device)
        order_F = self._orders[keys]
        weights = kjt.weights() if self._weighted else None
        lengths_FB, values = kjt.lengths().view(len(keys), kjt.stride()), kjt.values().to(torch.int64)
        if order_F is None:
            return Ids(lengths_FB, values, weights)
        if not self._features:
            return Ids(lengths_FB[:0], values[:0], None if weights is None else weights[:0])
        return Ids(*ops.permute_segments(order_F, lengths_FB, values, weights, num_ids))


RoutedFeatures = tuple[KeyedJaggedTensor, tuple[int, ...], Kept]
"""The features to send, counts for every rank, and the data that stays on this rank."""


class InputDist:
    """Starts batches, and keeps batches started ahead of `forward`. Features are recognized by identity: the same
    object. All ranks must start, send, wait for, take and drop batches in the same order.

    Args:
        device: device of the tables.
        prepare: checks and prepares features on the host, and is told whether the device has them too; for a GPU it
            runs in a thread, batch after batch.
        exchange: sends the result of `prepare`.
        updates: whether backward updates tables, so that gradients must not be scaled.
    """

    def __init__(
        self,
        device: torch.device,
        prepare: Callable[[KeyedJaggedTensor, bool], RoutedFeatures],
        exchange: IdExchange,
        updates: bool,
    ) -> None:
        self.device, self._prepare, self.exchange, self._updates = device, prepare, exchange, updates
        self._ahead: list[PendingInput] = []

    def route(self, features: KeyedJaggedTensor, on_device: bool = False) -> HostIds:
        """Host work. After an error on this rank, waiting for the batch raises on every rank.

        Args:
            features: on the host.
            on_device: whether the device has them too; it then splits them if it can.
        """
        exchange = self.exchange
        with span(ROUTE):
            outgoing: OutgoingIds | None = None
            try:
                kjt, counts, kept = self._prepare(features, on_device)
                split = exchange.device_split if on_device and kjt is features else None
                outgoing = exchange.sender.pack(kjt, counts, None if split is None else split.count(kjt))
                batch = HostIds(OnHost(outgoing), kept) if exchange.on_cpu else exchange.prepare(outgoing, kept)
            except Exception as error:  # any error must reach the ranks that wait for this one
                failure = exchange.sender.pack_failure(error, is_packed=outgoing is not None)
                batch = HostIds(OnHost(failure), Kept())
            return batch if exchange.on_cpu else exchange.announce(batch)

    def begin(self, features: KeyedJaggedTensor) -> PendingInput:
        """Starts a batch for a later call of `take`."""
        self._ahead.append(PendingInput(self, features))
        return self._ahead[-1]

    def take(self, features: KeyedJaggedTensor) -> PendingInput:
        """Takes the oldest batch that was started for these features, or starts one.

        A batch that was started without gradients cannot train: it is dropped, and started again.

        Raises:
            ValueError: gradients would be scaled.
        """
        kind = self.device.type
        scaled = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16
        if scaled and self._updates and torch.is_grad_enabled():
            raise ValueError(
                "float16 autocast needs a GradScaler, but the tables' optimizer inside backward ignores its scale; "
                "use bfloat16, which needs no scaler, or kernel 'dense', which leaves gradients to your optimizer"
            )
        for pending in self._ahead:
            if pending.features is features:
                self._ahead.remove(pending)
                if pending.trainable or not torch.is_grad_enabled():
                    return pending
                break
        return PendingInput(self, features, needed_now=True)

    def drop(self, pending: PendingInput) -> bool:
        """Forgets a batch; returns whether it had not been taken."""
        if pending not in self._ahead:
            return False
        self._ahead.remove(pending)
        return True

    def clear(self) -> None:
        """Forgets all batches that were started."""
        self._ahead = []


class PendingInput(Awaitable[RankIds]):
    """A batch during the exchange of its ids. `trainable`: it was started with gradients enabled.

    Args:
        needed_now: whether the caller waits for it next.
    """

    def __init__(self, input_dist: InputDist, features: KeyedJaggedTensor, needed_now: bool = False) -> None:
        self.features, self.trainable = features, torch.is_grad_enabled()
        self._device, self._exchange = input_dist.device, input_dist.exchange
        self._sent: SentIds | None = None
        self._error: Exception | None = None
        if self._device.type == "cpu":
            self._sent = input_dist.exchange.send(input_dist.route(features), features)
            return
        self._upload: Upload[HostIds] | None = None
        self._event: torch.cuda.Event | None = None
        self._copied = torch.cuda.current_stream(self._device).record_event()  # a copy of the features may be running
        on_host, on_device, trained = features.on_host(), features.device().type != "cpu", None
        weights = features.weights_or_none()
        if weights is not None and weights.requires_grad:
            leaf = on_host.weights().detach().requires_grad_(self.trainable)
            on_host, trained = on_host.with_weights(leaf), TrainedWeights(weights, leaf)

        def prepare() -> Upload[HostIds]:
            with torch.set_grad_enabled(self.trainable):
                return Upload(input_dist.route(on_host, on_device), trained)

        # Without other ranks, whose order of exchanges is that of the thread, a batch needs no thread.
        run = _at_once if needed_now and self._exchange.alone else _router().submit
        self._routed: Future[Upload[HostIds]] = run(prepare)

    def send(self) -> None:
        """Sends the routed batch, once, on the current stream; an error is kept for `wait`."""
        if self._sent is not None or self._error is not None:
            return
        try:
            self._upload = self._routed.result()
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._copied)
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
        # The buffers belong to the stream that sent. NCCL, for which this stream waits, reads the ids that were sent;
        # this stream reads the ids that arrived until backward.
        for buffer in (self._upload.on_device, self._sent.arrived, self._sent.words):
            if buffer is not None:
                buffer.record_stream(stream)


def _at_once(work: Callable[[], Upload[HostIds]]) -> Future[Upload[HostIds]]:
    done: Future[Upload[HostIds]] = Future()
    try:
        done.set_result(work())
    except Exception as error:
        done.set_exception(error)
    return done


@cache
def _router() -> ThreadPoolExecutor:
    """One thread per process: batches of all collections are routed in the order in which they were started."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="rayrec-router")


os.register_at_fork(after_in_child=_router.cache_clear)  # a forked child does not have the thread
