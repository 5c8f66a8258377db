"""Metrics of sessions (groups of examples shown together, each within one batch), and of pairs."""

from __future__ import annotations

from typing import Any

import torch

from rayrec.torchrec.metrics.streaming.measure import Examples, Measure, Options, Sums, share

PAIRS_AT_ONCE = 1 << 22  # bounds the memory of `_pair_sums`


def _session_order(scores_B: torch.Tensor, sessions_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the order by session and descending score, and the position of each example in its session, from 0."""
    order = scores_B.argsort(descending=True, stable=True)
    order = order[sessions_B[order].argsort(stable=True)]
    _, lengths = sessions_B[order].unique_consecutive(return_counts=True)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return order, torch.arange(len(order), device=order.device) - starts


def _above(scores_B: torch.Tensor, sessions_B: torch.Tensor) -> torch.Tensor:
    """Returns the number of examples in the same session with a higher score, [B]."""
    order, position = _session_order(scores_B, sessions_B)
    scores, sessions = scores_B[order], sessions_B[order]
    starts_tie = torch.ones_like(order, dtype=torch.bool)
    starts_tie[1:] = (scores[1:] != scores[:-1]) | (sessions[1:] != sessions[:-1])
    tie_start = torch.where(starts_tie, torch.arange(len(order), device=order.device), 0).cummax(0).values
    return torch.empty_like(position).scatter_(0, order, position[tie_start])


def _predicted(examples: Examples, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns whether each example is among the first ones of its session, and its label, [T, B] each."""
    predicted, labels = [], []
    for index, task in enumerate(options["tasks"]):
        session = task.session_metric_def
        if session is None or session.top_threshold is None:
            raise ValueError(
                f"task {task.name!r}: session_metric_def must be SessionMetricDef(session_var_name, top_threshold)"
            )
        sessions_B = examples.inputs[session.session_var_name][index]
        predicted.append(_above(examples.predictions[index], sessions_B) < session.top_threshold)
        label_B = examples.labels_TB[index]
        if session.run_ranking_of_labels:
            label_B = _above(label_B, sessions_B) < session.top_threshold
        labels.append(label_B)
    return torch.stack(predicted), torch.stack(labels).double()


def _session_recall(examples: Examples, options: Options) -> Sums:
    predicted_TB, labels_TB = _predicted(examples, options)
    return {
        "num_true_pos": examples.weighted_sum(predicted_TB * labels_TB),
        "num_false_neg": examples.weighted_sum(~predicted_TB * labels_TB),
    }


def _session_precision(examples: Examples, options: Options) -> Sums:
    predicted_TB, labels_TB = _predicted(examples, options)
    return {
        "num_true_pos": examples.weighted_sum(predicted_TB * labels_TB),
        "num_false_pos": examples.weighted_sum(predicted_TB * (1 - labels_TB)),
    }


def _session_inputs(options: Options) -> set[str]:
    return {task.session_metric_def.session_var_name for task in options["tasks"] if task.session_metric_def}


def _ndcg_sums(examples: Examples, options: Options) -> Sums:
    """The sums of NDCG (Järvelin & Kekäläinen 2002). A session without gain has NDCG 0."""
    totals, sessions = [], []
    for task, keys_B in enumerate(examples.inputs[options["session_key"]].long()):
        scores_B, gains_B = examples.predictions[task], examples.labels_TB[task]
        if options["tasks"][task].is_negative_task:
            scores_B, gains_B = 1 - scores_B, 1 - gains_B
        samples_B = torch.stack((scores_B, gains_B, examples.weights_TB[task]))
        if options["remove_single_length_sessions"]:
            _, inverse_B, lengths = keys_B.unique(return_inverse=True, return_counts=True)
            is_long_B = lengths[inverse_B] > 1
            keys_B, samples_B = keys_B[is_long_B], samples_B[:, is_long_B]
        total, count = _ndcg(samples_B, keys_B, options)
        totals.append(total)
        sessions.append(count)
    return {"sum_ndcg": torch.stack(totals), "num_sessions": torch.stack(sessions)}


def _ndcg(samples_B: torch.Tensor, keys_B: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of the NDCG of sessions, and their number.

    Args:
        samples_B: scores, gains and weights, [3, B].
        keys_B: the session of each example.
        options: the options of the metric.
    """
    scores_B, gains_B, weights_B = samples_B
    if options["scale_by_weights_tensor"]:
        scores_B, gains_B = scores_B * weights_B, gains_B * weights_B
    names, sessions_B = keys_B.unique(return_inverse=True)

    def dcg(by_B: torch.Tensor) -> torch.Tensor:
        order, position = _session_order(by_B, sessions_B)
        gains = gains_B[order].exp2() - 1 if options["exponential_gain"] else gains_B[order]
        discounted = gains / (position + 2).double().log2()
        discounted = discounted if options["k"] < 0 else discounted * (position < options["k"])
        return discounted.new_zeros(len(names)).index_add_(0, sessions_B[order], discounted)

    ideal = dcg(gains_B)
    ndcg = dcg(scores_B) / torch.where(ideal == 0, 1e-6, ideal)
    values = 1 - ndcg if options["report_ndcg_as_decreasing_curve"] else ndcg
    if not options["scale_by_weights_tensor"]:
        values = values * torch.zeros_like(ndcg).scatter_reduce_(0, sessions_B, weights_B, "amax")
    return values.sum(), values.new_tensor(len(names))


def _pair_sums(examples: Examples, options: Options) -> Sums:
    """The sums over all pairs of a batch, computed for blocks of examples against all examples."""
    correct, total = (torch.zeros_like(examples.labels_TB[:, 0]) for _ in range(2))
    block = max(1, PAIRS_AT_ONCE // max(1, examples.count * len(correct)))
    for start in range(0, examples.count, block):
        rows = slice(start, start + block)

        def signs(values_TB: torch.Tensor, rows: slice = rows) -> torch.Tensor:
            return (values_TB[:, rows, None] - values_TB[:, None, :]).sign()

        pairs = (examples.weights_TB[:, rows, None] * examples.weights_TB[:, None, :]).triu(start + 1)
        correct += (pairs * (signs(examples.predictions) == signs(examples.labels_TB))).sum((1, 2))
        total += pairs.sum((1, 2))
    return {"error_sum": correct, "weighted_num_pairs": total}


def _tensor_sums(examples: Examples, options: Options) -> Sums:
    """The sums of the tensor that each task names, with or without weights."""
    tasks: Any = options["tasks"]
    values_TB = torch.stack([examples.inputs[task.tensor_name][index] for index, task in enumerate(tasks)])
    weighted = torch.tensor([[task.weighted] for task in tasks], device=values_TB.device)
    weights_TB = torch.where(weighted, examples.weights_TB, 1.0)
    return {"weighted_sum": (weights_TB * values_TB).sum(-1), "weighted_num_samples": weights_TB.sum(-1)}


SESSIONS = {
    "recall_session_level": Measure(
        sums=("num_true_pos", "num_false_neg"),
        of_batch=_session_recall,
        results=lambda sums, options: {
            "recall_session_level": sums["num_true_pos"] / (sums["num_true_pos"] + sums["num_false_neg"])
        },
        options={"tasks": ()},
        inputs=_session_inputs,
    ),
    "precision_session_level": Measure(
        sums=("num_true_pos", "num_false_pos"),
        of_batch=_session_precision,
        results=lambda sums, options: {
            "precision_session_level": sums["num_true_pos"] / (sums["num_true_pos"] + sums["num_false_pos"])
        },
        options={"tasks": ()},
        inputs=_session_inputs,
    ),
    "ndcg": Measure(
        sums=("sum_ndcg", "num_sessions"),
        of_batch=_ndcg_sums,
        results=lambda sums, options: {"ndcg": sums["sum_ndcg"] / sums["num_sessions"]},
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
        results=lambda sums, options: {"xauc": share(sums["error_sum"], sums["weighted_num_pairs"])},
    ),
    "tensor_weighted_avg": Measure(
        sums=("weighted_sum", "weighted_num_samples"),
        of_batch=_tensor_sums,
        results=lambda sums, options: {
            f"weighted_avg{options['description'] or ''}": sums["weighted_sum"] / sums["weighted_num_samples"]
        },
        options={"tasks": (), "description": None},
        inputs=lambda options: {task.tensor_name for task in options["tasks"] if task.tensor_name},
    ),
}
