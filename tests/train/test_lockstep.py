"""Ranks in step: unequal numbers of batches, failures on one rank, and what is worth another attempt."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ray.exceptions import WorkerCrashedError

from rayrec.checkpoint import FencedError, TakenOverError
from rayrec.data import Cursor, DataError
from rayrec.data.order.cursor import Progress
from rayrec.distributed.comm import all_to_all, collectives, count_collectives
from rayrec.models import Batch
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train import StorageError, TrainError
from rayrec.train.errors import _raised_in, is_lost_peer, is_retryable
from rayrec.train.worker.lockstep import Every, RankError, StepInput, in_step
from rayrec.train.worker.position import START
from rayrec.train.worker.window import Window, touched
from tests.ranks import on_ranks
from tests.train.small import USERS, Heard, config_of, control_of, fit_job, make_job, raw_config, write_all


def batch(rows: int) -> Batch:
    kjt = KeyedJaggedTensor(["f"], torch.zeros(rows, dtype=torch.int64), lengths=torch.ones(rows, dtype=torch.int64))
    return Batch(torch.zeros(rows, 0), kjt, torch.zeros(rows))


class Rows:
    """A stream that yields batches of the given sizes, then fails if told to."""

    start_cursor = 0

    def __init__(self, sizes: list[int], error: Exception | None = None) -> None:
        self.sizes, self.error = sizes, error

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        for number, rows in enumerate(self.sizes):
            yield batch(rows), number + 1
        if self.error is not None:
            raise self.error


def turns(group: dist.ProcessGroup, sizes: list[list[int]]) -> tuple[list[tuple[int, int, Any]], int]:
    mine = Rows(sizes[group.rank()])
    with count_collectives() as counted:
        found = [(given.batch.rows, given.rows, given.cursor) for given in in_step(mine, batch(0), control_of(group))]
    return found, counted.total()


def test_a_rank_that_runs_out_goes_on_with_empty_batches() -> None:
    first, second, third = on_ranks(3, turns, [[5, 5, 2], [5], []])
    assert first == ([(5, 10, 1), (5, 5, 2), (2, 2, 3)], 4)
    assert second == ([(5, 10, 1), (0, 5, 1), (0, 2, 1)], 4)
    assert third == ([(0, 10, 0), (0, 5, 0), (0, 2, 0)], 4)


class Late(Rows):
    """The same, and every batch takes its time."""

    def __init__(self, sizes: list[int], seconds: float) -> None:
        super().__init__(sizes)
        self.seconds = seconds

    def __iter__(self) -> Iterator[tuple[Batch, int]]:
        for item in super().__iter__():
            time.sleep(self.seconds)
            yield item


def waits(group: dist.ProcessGroup) -> list[float]:
    mine = Late([5, 5], 0.2) if group.rank() == 1 else Rows([5, 5])
    return [given.wait_s for given in in_step(mine, batch(0), control_of(group), since=time.perf_counter() - 0.1)]


def test_a_step_has_waited_as_long_as_the_rank_that_waited_longest() -> None:
    first, second = on_ranks(2, waits)
    assert first == second
    assert first[0] >= 0.3 and first[1] >= 0.2


def fails(group: dist.ProcessGroup, error: Exception) -> tuple[str, bool]:
    mine = Rows([5], error if group.rank() == 1 else None)
    with pytest.raises(RankError) as caught:
        list(in_step(mine, batch(0), control_of(group)))
    return str(caught.value), caught.value.retry


@pytest.mark.parametrize(
    ("error", "text", "retry"),
    [
        (DataError("a label is 2", file="a.parquet", row=7), "a label is 2 (file a.parquet, row 7)", False),
        (KeyError("x"), "KeyError: 'x'", False),
        (OSError("disk is away"), "OSError: disk is away", True),
    ],
)
def test_an_error_of_one_rank_ends_all_with_its_text(error: Exception, text: str, retry: bool) -> None:
    assert on_ranks(2, fails, error) == [(text, retry)] * 2


def together(group: dist.ProcessGroup) -> list[Any]:
    ranks = control_of(group)

    def only_rank_1() -> int:
        if ranks.rank == 1:
            raise ValueError("rank 1 has no such file")
        return 3

    with pytest.raises(RankError, match="rank 1 has no such file"):
        ranks.together(only_rank_1)
    return [ranks.together(lambda: ranks.rank), ranks.sums([1.5, ranks.rank]), ranks.gather(ranks.rank)]


def test_acts_that_fail_on_one_rank_fail_on_all() -> None:
    assert on_ranks(2, together) == [[0, [3.0, 1.0], [0, 1]], [1, [3.0, 1.0], [0, 1]]]


def test_alone_there_is_nothing_to_exchange() -> None:
    alone = control_of()
    with count_collectives() as counted:
        assert [given.rows for given in in_step(Rows([3, 2]), batch(0), alone)] == [3, 2]
        with pytest.raises(RankError, match="bad"):
            list(in_step(Rows([3], ValueError("bad")), batch(0), alone))
    assert not counted


@pytest.mark.parametrize(
    ("error", "retry"),
    [
        (DataError("bad row"), False),
        (ValueError("x"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (torch.cuda.OutOfMemoryError("out of memory"), False),
        (FileNotFoundError("x"), False),
        (PermissionError("x"), False),
        (OSError("I/O error"), True),
        (TakenOverError("here", "elsewhere"), False),
        (FencedError("another attempt"), True),
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("Connection reset by peer"), False),  # words decide nothing
        (WorkerCrashedError(), True),
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), True),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), True),  # until trainer.max_failures
        (RuntimeError("CUDA error: unspecified launch failure"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm(...)`"), False),
    ],
)
def test_only_what_may_end_otherwise_is_tried_again(error: Exception, retry: bool) -> None:
    assert is_retryable(error) is retry


def test_a_read_that_ray_lost_is_tried_again() -> None:
    error = DataError("reading failed")
    error.__cause__ = WorkerCrashedError()
    assert is_retryable(error)
    assert not is_lost_peer(error)


def outlives_rank_1(group: dist.ProcessGroup, folder: Path, exchange: str) -> None:
    if group.rank() == 1:
        os._exit(1)
    parts = torch.zeros(2, 3, requires_grad=True)
    try:
        if exchange == "control":
            control_of(group).sums([1.0])
        else:
            wait = all_to_all(torch.empty(2, 3), parts.detach(), None, None, group)
            wait()
    except Exception as error:
        (folder / "told").write_text(f"{is_lost_peer(error)} {is_retryable(error)} {type(error).__name__}")


def outlives_rank_1_in_backward(group: dist.ProcessGroup, folder: Path) -> None:
    """The gradients' all-reduce of DistributedDataParallel runs in C++, as between several CPU hosts."""
    layers = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
    model = torch.nn.parallel.DistributedDataParallel(layers, process_group=group, bucket_cap_mb=1)
    if group.rank() == 1:
        layers[4].weight.register_hook(lambda _: os._exit(1))
    try:
        model(torch.ones(4, 512)).sum().backward()
    except Exception as error:
        told = f"{is_lost_peer(error)} {is_retryable(error)} {_raised_in(error)} {type(error).__name__} {error}"
        (folder / "told").write_text(told)


def test_a_death_seen_inside_of_backward_is_a_lost_peer(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1: the process died"):
        on_ranks(2, outlives_rank_1_in_backward, tmp_path)
    assert (tmp_path / "told").read_text().startswith("True True torch.autograd.")


def test_an_error_of_the_model_in_backward_is_none_of_a_peer() -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad[:1]  # of another shape: torch refuses it in C++

    with pytest.raises(RuntimeError) as caught:
        Breaks.apply(torch.ones(3, requires_grad=True)).sum().backward()
    assert _raised_in(caught.value).startswith("torch.autograd.")
    assert not is_lost_peer(caught.value) and not is_retryable(caught.value)


@pytest.mark.parametrize("exchange", ["control", "model"])
def test_what_a_rank_sees_of_anothers_death_is_known_by_where_it_was_raised(tmp_path: Path, exchange: str) -> None:
    with pytest.raises(AssertionError, match="rank 1: the process died"):
        on_ranks(2, outlives_rank_1, tmp_path, exchange)
    assert (tmp_path / "told").read_text().startswith("True True")


def both_fail(group: dist.ProcessGroup) -> tuple[str, bool]:
    errors = [OSError("disk is away"), ValueError("a label is 2"), KeyError("x")]
    with pytest.raises(RankError) as caught:
        control_of(group).load(1, 1.0, error=errors[group.rank()])
    return str(caught.value), caught.value.retry


def test_of_several_failures_the_first_lasting_one_is_told() -> None:
    assert on_ranks(3, both_fail) == [("a label is 2", False)] * 3


def at_unlike_places(group: dist.ProcessGroup) -> str:
    ranks = control_of(group)
    ranks.sums([1.0])
    with pytest.raises(RankError) as caught:
        ranks.gather("a") if group.rank() else ranks.load(3, 3.0)
    return str(caught.value)


def test_ranks_at_unlike_exchanges_are_told_so() -> None:
    first, second = on_ranks(2, at_unlike_places)
    assert first == second
    assert "rank 0: step (exchange 1); rank 1: gather (exchange 1)" in first


def stopped(group: dist.ProcessGroup) -> list[bool]:
    asked = iter([False, group.rank() == 1, False])
    ranks = control_of(group, lambda: next(asked))
    return [given.stop for given in in_step(Rows([2, 2]), batch(0), ranks)]


def test_a_stop_that_one_rank_has_heard_of_reaches_all_at_the_same_step() -> None:
    assert on_ranks(2, stopped) == [[False, True]] * 2


def speeds(group: dist.ProcessGroup) -> dict[str, Any]:
    """Two steps of 8 rows in all: rank 0 brings 6 of them in 1 s, rank 1 the others in 3 s."""
    ranks = control_of(group)
    window = Window(torch.device("cpu"), ranks, group)
    mine, seconds = ((6, 1.0), (2, 3.0))[group.rank()]
    for _ in range(2):
        given = StepInput(batch(mine), 8, float(mine), mine / 8, 0, wait_s=0.5)
        window.add(given, torch.tensor(float(group.rank())), torch.zeros(mine), seconds)
    return window.close(2)


def test_a_window_goes_on_from_its_state() -> None:
    """Also in a world of one."""
    alone = control_of()
    window, other = (Window(torch.device("cpu"), alone, None) for _ in range(2))
    window.add(StepInput(batch(6), 6, 6.0, 1.0, 0, wait_s=0.5), torch.tensor(2.0), torch.arange(6.0), 1.0, 0.25)
    other.load_state(window.state(1))
    assert not other.empty
    assert other.close(1) == window.close(1)
    assert other.empty and window.empty


def test_a_window_tells_the_speed_and_loss_of_all_ranks() -> None:
    for figures in on_ranks(2, speeds):
        assert figures["samples_per_second"] == pytest.approx(16 / 4)  # 16 rows in a mean of (2 + 6) / 2 seconds
        assert figures["loss"] == pytest.approx((12 * 0.0 + 4 * 1.0) / 16)
        assert figures["data_wait_fraction"] == pytest.approx(2 * 2 * 0.5 / 8)


def what_a_checkpoint_holds(group: dist.ProcessGroup) -> tuple[dict[str, Any], Cursor, dict[str, int]]:
    """The window of a rank with ten rows, and the rows that it has read, between hosts; how they were exchanged."""
    control, rank = control_of(group), group.rank()
    window = Window(torch.device("cpu"), control, group)
    window.add(StepInput(batch(10), 30, 10.0, 1 / 3, 0, wait_s=0.5), torch.tensor(rank), torch.arange(10.0), 1.0)
    progress = Progress(data="d", world_size=3, total=90, rows=((rank, 10 + rank),))
    position = replace(START, cursor=Cursor(epoch=0, parts=(progress,), skipped=rank))
    other = replace(START, cursor=Cursor(epoch=0, parts=(replace(progress, total=rank),)))
    with mock.patch.object(collectives, "link_of", lambda *_: None):
        with count_collectives() as counted:
            state, merged = window.state(1), position.merged(control)
        with pytest.raises(ValueError, match="cursors differ in total"):
            other.merged(control)
    assert merged.skipped == 3
    return state, merged.cursor, dict(counted)


def test_a_checkpoint_costs_exchanges_along_a_tree_of_the_ranks() -> None:
    ranks = on_ranks(3, what_a_checkpoint_holds)
    for state, cursor, counted in ranks:
        assert state["window/sums"].tolist() == [30.0, 30.0, 30.0, 1.5, 0.0, 3.0, 30.0]
        assert cursor.parts[0].rows == ((0, 10), (1, 11), (2, 12))
        assert counted == {"combine": 2, "combine_objects": 1, "sum_on_rank_0": 1}
    assert ranks[0][0]["window/counts"].sum() == 30


def every(interval: int | str | None) -> Every:
    return Every(config_of(trainer__eval_every=interval).trainer.eval_every)


def test_what_is_due_by_steps_and_by_time() -> None:
    by_steps = every(3)
    assert [by_steps.is_due(step, 0.0) for step in range(1, 7)] == [False, False, True, False, False, True]
    by_time = every("2s")
    assert [by_time.is_due(1, clock) for clock in (7.0, 8.0, 9.0, 10.0, 11.5)] == [False, False, True, False, True]
    by_time.restart()
    assert [by_time.is_due(1, clock) for clock in (99.0, 100.0, 101.0)] == [False, False, True]
    never = every(None)
    assert not never.is_due(1, 0.0) and not never.is_due(2, 1e9) and not never.is_early(1)


def test_the_first_steps_are_early_until_the_first_duration_has_passed() -> None:
    def early(turns: Every, clocks: list[float]) -> list[int]:
        steps = enumerate(clocks, start=1)
        return [step for step, clock in steps if not turns.is_due(step, clock) and turns.is_early(step)]

    assert early(every("10s"), [0.1] * 63) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]
    assert early(every("10s"), [0.0, 4.0, 8.0, 10.0, 10.0, 10.0, 10.0, 10.0]) == [1, 2, 3]
    assert early(every(5), [0.0] * 63) == []


def window_of(steps: int, loss: float = 2.0) -> Window:
    window = Window(torch.device("cpu"), control_of(), None)
    for _ in range(steps):
        window.add(StepInput(batch(4), 4, 2.0, 1.0, 0, wait_s=0.5), torch.tensor(loss), torch.zeros(4), 2.0)
    return window


def test_a_window_refuses_a_loss_that_is_not_finite_and_begins_anew() -> None:
    window = window_of(3)
    window.state(3)
    with pytest.raises(TrainError, match="not finite at step 3"):
        window.state(3, sound=False)
    figures = window.close(3)
    assert (figures["loss"], figures["samples_per_second"], figures["data_wait_fraction"]) == (2.0, 2.0, 0.25)
    assert figures.keys() >= {"ne", "auc"} and window.empty
    assert window.close(3)["loss"] is None and window.close(3)["samples_per_second"] == 0.0
    bad = window_of(1, math.nan)
    with pytest.raises(TrainError, match="at step 9"):
        bad.close(9)
    assert bad.empty and bad.close(10)["loss"] is None
    waiting = window_of(0)
    waiting.add(StepInput(batch(4), 4, 2.0, 1.0, 0, wait_s=5.0), torch.tensor(1.0), torch.zeros(4), 2.0, 0.5)
    figures = waiting.close(1)
    assert (figures["data_wait_fraction"], figures["exchange_fraction"]) == (1.0, 0.25)
    assert waiting.state(1)["window/sums"].tolist() == [0.0] * 7


def test_what_a_new_attempt_cannot_mend() -> None:
    lasting = [FileNotFoundError(), PermissionError(), IsADirectoryError(), NotADirectoryError(), FileExistsError()]
    assert not any(is_retryable(error) for error in [*lasting, ValueError("x"), KeyError("x"), StorageError("x")])
    assert all(is_retryable(error) for error in (OSError("x"), EOFError(), BrokenPipeError(), TimeoutError()))


def test_rows_and_skew_by_table() -> None:
    lengths = torch.tensor([1, 1, 2, 0, 0, 3])  # of a, b and c, two examples each
    sparse = KeyedJaggedTensor(["a", "b", "c"], torch.tensor([4, 4, 4, 9, 0, 1, 2]), lengths=lengths)
    found = touched(sparse, [("both", ["a", "b"]), ("own", ["c"])])
    assert found == {"both": {"ids": 4, "rows": 2, "top": 0.75}, "own": {"ids": 3, "rows": 3, "top": 1 / 3}}


def test_a_table_without_an_id_has_no_skew() -> None:
    nothing = KeyedJaggedTensor(["a"], torch.empty(0, dtype=torch.int64), lengths=torch.zeros(2, dtype=torch.int64))
    assert touched(nothing, [("t", ["a"])]) == {"t": {"ids": 0, "rows": 0, "top": None}}


def test_a_run_tells_how_tables_are_looked_up_once_a_minute(tmp_path: Path) -> None:
    write_all(tmp_path)
    told: list[dict[str, Any]] = []
    fit_job(make_job(raw_config(tmp_path, trainer__log_every=1)), None, Heard(told.append))
    first, *later = [record for record in told if record["kind"] == "train"]
    assert later and not any("tables" in record for record in later)
    user = first["tables"]["user"]
    assert set(first["tables"]) == {"user", "item", "tag"}
    assert user["ids"] == first["samples"]
    assert 1 < user["rows"] <= USERS and 1 / USERS <= user["top"] < 1
