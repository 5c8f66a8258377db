"""Extracts the labels, predictions and weights of tasks from the outputs of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from rayrec.torchrec.metrics.metrics_config import RecTaskInfo

Outputs = Mapping[str, torch.Tensor]
ByTask = dict[str, torch.Tensor]


def is_empty_signals(labels: torch.Tensor, predictions: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether a batch has no examples."""
    return not (labels.numel() or predictions.numel() or weights.numel())


def _output(kind: str, name: str, model_out: Outputs) -> torch.Tensor | None:
    if not name:
        return None
    if name not in model_out:
        raise ValueError(f"the {kind} {name!r} is not among the model's outputs {list(model_out)}")
    return model_out[name].squeeze()


def parse_model_outputs(
    label_name: str, prediction_name: str, weight_name: str, model_out: Outputs
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Returns label [B], prediction [B] or [B, C], and weight [B] of a task; None for an output without a name.

    Raises:
        ValueError: an output is missing, or its size differs from the label's.
    """
    label = _output("label", label_name, model_out)
    if label is None:
        raise ValueError("a task needs a label_name")
    outputs = [_output("prediction", prediction_name, model_out), _output("weight", weight_name, model_out)]
    for name, output in zip((prediction_name, weight_name), outputs, strict=True):
        if output is not None:
            classes = output.shape[-1] if name == prediction_name and output.dim() > label.dim() else 1
            if output.numel() != label.numel() * classes:
                raise ValueError(f"{name} has {output.numel()} values, but {label_name} has {label.numel()}")
    if not label.dim():
        label = label.unsqueeze(0)
        outputs = [None if output is None else output.reshape(1, -1).squeeze(0) for output in outputs]
    return label, outputs[0], outputs[1]


def parse_required_inputs(
    model_out: Outputs,
    required_inputs_list: Sequence[str],
    ndcg_transform_input: bool = False,
    device: torch.device | None = None,
) -> ByTask:
    """Returns other outputs of the model by name.

    Args:
        model_out: all outputs.
        required_inputs_list: names of the outputs to return.
        ndcg_transform_input: not supported; must be False.
        device: device to move them to.

    Raises:
        ValueError: `ndcg_transform_input`.
        KeyError: an output is missing.
    """
    if ndcg_transform_input:
        raise ValueError("ndcg_transform_input: pass session ids as integers, for example from session_ids_to_tensor")
    outputs = {name: model_out[name].squeeze() for name in required_inputs_list}
    return outputs if device is None else {name: value.to(device) for name, value in outputs.items()}


def parse_task_model_outputs(
    tasks: Sequence[RecTaskInfo], model_out: Outputs, required_inputs_list: Sequence[str] | None = None
) -> tuple[ByTask, ByTask, ByTask, ByTask]:
    """Returns labels, predictions and weights by task, and the required inputs by name. Omits the tasks of an empty
    batch.

    Raises:
        ValueError: an output of a task is missing, or its size differs from the label's.
    """
    labels: ByTask = {}
    predictions: ByTask = {}
    weights: ByTask = {}
    for task in tasks:
        try:
            label, prediction, weight = parse_model_outputs(
                task.label_name, task.prediction_name or "", task.weight_name or "", model_out
            )
        except ValueError as error:
            raise ValueError(f"task {task.name!r}: {error}") from None
        if label.numel():
            for by_task, output in ((labels, label), (predictions, prediction), (weights, weight)):
                if output is not None:
                    by_task[task.name] = output
    required = parse_required_inputs(model_out, required_inputs_list) if required_inputs_list else {}
    return labels, predictions, weights, required


def session_ids_to_tensor(session_ids: Sequence[str], device: torch.device | None = None) -> torch.Tensor:
    """Numbers the sessions from 1, int64. Each change of the id starts a session."""
    changes = [previous != current for previous, current in pairwise(session_ids)]
    start = [1] if session_ids else []
    return torch.tensor([*start, *changes], dtype=torch.int64, device=device).cumsum(0)
