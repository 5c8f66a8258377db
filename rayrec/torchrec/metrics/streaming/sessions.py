"""Metrics of sessions, groups of examples that were shown together, each session whole in one batch; and of pairs."""

from __future__ import annotations

from typing import Any

import torch

from rayrec.torchrec.metrics.streaming.measure import Examples, Measure, Options, Sums, share

PAIRS_AT_ONCE = 1 << 22


def _places(scores_B: torch.Tensor, sessions_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(order, place): examples by session and falling score, and each one's place in its session, from 0."""
    order = scores_B.argsort(descending=True, stable=True)
    order = order[sessions_B[order].argsort(stable=True)]
    _, lengths = sessions_B[order].unique_consecutive(return_counts=True)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return order, torch.arange(len(order), device=order.device) - starts


def _above(scores_B: torch.Tensor, sessions_B: torch.Tensor) -> torch.Tensor:
    """How many of its session score higher, [B]."""
    order, place = _places(scores_B, sessions_B)
    scores, sessions = scores_B[order], sessions_B[order]
    new = torch.ones_like(order, dtype=torch.bool)
    new[1:] = (scores[1:] != scores[:-1]) | (sessions[1:] != sessions[:-1])
    first_of_tie = torch.where(new, torch.arange(len(order), device=order.device), 0).cummax(0).values
    return torch.empty_like(place).scatter_(0, order, place[first_of_tie])


def _called(examples: Examples, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """(whether each example is among its session's first, its label), [T, B] each."""
    called, labels = [], []
    for place, task in enumerate(options["tasks"]):
        of = task.session_metric_def
        if of is None or of.top_threshold is None:
            raise ValueError(f"task {task.name!r}: give it SessionMetricDef(session_var_name, top_threshold)")
        sessions_B = examples.inputs[of.session_var_name][place]
        called.append(_above(examples.predictions[place], sessions_B) < of.top_threshold)
        label_B = examples.labels_TB[place]
        labels.append(_above(label_B, sessions_B) < of.top_threshold if of.run_ranking_of_labels else label_B)
    return torch.stack(called), torch.stack(labels).double()


def _session_recall(examples: Examples, options: Options) -> Sums:
    called_TB, labels_TB = _called(examples, options)
    return {
        "num_true_pos": examples.weighted_sum(called_TB * labels_TB),
        "num_false_neg": examples.weighted_sum(~called_TB * labels_TB),
    }


def _session_precision(examples: Examples, options: Options) -> Sums:
    called_TB, labels_TB = _called(examples, options)
    return {
        "num_true_pos": examples.weighted_sum(called_TB * labels_TB),
        "num_false_pos": examples.weighted_sum(called_TB * (1 - labels_TB)),
    }


def _session_inputs(options: Options) -> set[str]:
    return {task.session_metric_def.session_var_name for task in options["tasks"] if task.session_metric_def}


def _ndcg_sums(examples: Examples, options: Options) -> Sums:
    """Järvelin & Kekäläinen 2002. A session without a gain counts as NDCG 0."""
    totals, sessions = [], []
    for task, keys_B in enumerate(examples.inputs[options["session_key"]].long()):
        scores_B, gains_B = examples.predictions[task], examples.labels_TB[task]
        if options["tasks"][task].is_negative_task:
            scores_B, gains_B = 1 - scores_B, 1 - gains_B
        of_B = torch.stack((scores_B, gains_B, examples.weights_TB[task]))
        if options["remove_single_length_sessions"]:
            _, inverse_B, lengths = keys_B.unique(return_inverse=True, return_counts=True)
            several_B = lengths[inverse_B] > 1
            keys_B, of_B = keys_B[several_B], of_B[:, several_B]
        total, count = _ndcg(of_B, keys_B, options)
        totals.append(total)
        sessions.append(count)
    return {"sum_ndcg": torch.stack(totals), "num_sessions": torch.stack(sessions)}


def _ndcg(of_B: torch.Tensor, keys_B: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """(Σ of what sessions count, sessions), of scores, gains and weights [3, B]."""
    scores_B, gains_B, weights_B = of_B
    if options["scale_by_weights_tensor"]:
        scores_B, gains_B = scores_B * weights_B, gains_B * weights_B
    names, sessions_B = keys_B.unique(return_inverse=True)

    def dcg(by_B: torch.Tensor) -> torch.Tensor:
        order, place = _places(by_B, sessions_B)
        gains = gains_B[order].exp2() - 1 if options["exponential_gain"] else gains_B[order]
        worth = gains / (place + 2).double().log2()
        worth = worth if options["k"] < 0 else worth * (place < options["k"])
        return worth.new_zeros(len(names)).index_add_(0, sessions_B[order], worth)

    ideal = dcg(gains_B)
    ndcg = dcg(scores_B) / torch.where(ideal == 0, 1e-6, ideal)
    counted = 1 - ndcg if options["report_ndcg_as_decreasing_curve"] else ndcg
    if not options["scale_by_weights_tensor"]:
        counted = counted * torch.zeros_like(ndcg).scatter_reduce_(0, sessions_B, weights_B, "amax")
    return counted.sum(), counted.new_tensor(len(names))


def _pair_sums(examples: Examples, options: Options) -> Sums:
    """Over all pairs of a batch, a block of examples against all at a time."""
    right, whole = (torch.zeros_like(examples.labels_TB[:, 0]) for _ in range(2))
    block = max(1, PAIRS_AT_ONCE // max(1, examples.count * len(right)))
    for start in range(0, examples.count, block):
        rows = slice(start, start + block)

        def signs(values_TB: torch.Tensor, rows: slice = rows) -> torch.Tensor:
            return (values_TB[:, rows, None] - values_TB[:, None, :]).sign()

        pairs = (examples.weights_TB[:, rows, None] * examples.weights_TB[:, None, :]).triu(start + 1)
        right += (pairs * (signs(examples.predictions) == signs(examples.labels_TB))).sum((1, 2))
        whole += pairs.sum((1, 2))
    return {"error_sum": right, "weighted_num_pairs": whole}


def _tensor_sums(examples: Examples, options: Options) -> Sums:
    """Of the tensor that each task names, weighted or not."""
    tasks: Any = options["tasks"]
    values_TB = torch.stack([examples.inputs[task.tensor_name][place] for place, task in enumerate(tasks)])
    weighted = torch.tensor([[task.weighted] for task in tasks], device=values_TB.device)
    weights_TB = torch.where(weighted, examples.weights_TB, 1.0)
    return {"weighted_sum": (weights_TB * values_TB).sum(-1), "weighted_num_samples": weights_TB.sum(-1)}


SESSIONS = {
    "recall_session_level": Measure(
        sums=("num_true_pos", "num_false_neg"),
        of_batch=_session_recall,
        figures=lambda sums, options: {
            "recall_session_level": sums["num_true_pos"] / (sums["num_true_pos"] + sums["num_false_neg"])
        },
        options={"tasks": ()},
        inputs=_session_inputs,
    ),
    "precision_session_level": Measure(
        sums=("num_true_pos", "num_false_pos"),
        of_batch=_session_precision,
        figures=lambda sums, options: {
            "precision_session_level": sums["num_true_pos"] / (sums["num_true_pos"] + sums["num_false_pos"])
        },
        options={"tasks": ()},
        inputs=_session_inputs,
    ),
    "ndcg": Measure(
        sums=("sum_ndcg", "num_sessions"),
        of_batch=_ndcg_sums,
        figures=lambda sums, options: {"ndcg": sums["sum_ndcg"] / sums["num_sessions"]},
        options={
            "tasks": (),
            "exponential_gain": False,
            "session_key": "session_id",
            "k": -1,
            "report_ndcg_as_decreasing_curve": True,
            "remove_single_length_sessions": False,
            "scale_by_weights_tensor": False,
        },
        inputs=lambda options: {options["session_key"]},
    ),
    "xauc": Measure(
        sums=("error_sum", "weighted_num_pairs"),
        of_batch=_pair_sums,
        figures=lambda sums, options: {"xauc": share(sums["error_sum"], sums["weighted_num_pairs"])},
    ),
    "tensor_weighted_avg": Measure(
        sums=("weighted_sum", "weighted_num_samples"),
        of_batch=_tensor_sums,
        figures=lambda sums, options: {
            f"weighted_avg{options['description'] or ''}": sums["weighted_sum"] / sums["weighted_num_samples"]
        },
        options={"tasks": (), "description": None},
        inputs=lambda options: {task.tensor_name for task in options["tasks"] if task.tensor_name},
    ),
}
