"""Tasks' labels, predictions and weights out of a model's outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
        raise ValueError(f"the model's outputs have no {kind} {name!r}; they have {list(model_out)}")
    return model_out[name].squeeze()


def parse_model_outputs(
    label_name: str, prediction_name: str, weight_name: str, model_out: Outputs
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Label [B], prediction [B] or [B, C], and weight [B] of a task; None for one without a name.

    Raises:
        ValueError: an output is missing, or of another size than the label.
    """
    label = _output("label", label_name, model_out)
    if label is None:
        raise ValueError("a task needs a label_name")
    parts = [_output("prediction", prediction_name, model_out), _output("weight", weight_name, model_out)]
    for name, part in zip((prediction_name, weight_name), parts, strict=True):
        if part is not None:
            classes = part.shape[-1] if name == prediction_name and part.dim() > label.dim() else 1
            if part.numel() != label.numel() * classes:
                raise ValueError(f"{name} has {part.numel()} numbers and {label_name} {label.numel()}")
    if not label.dim():
        label, parts = label.unsqueeze(0), [part if part is None else part.reshape(1, -1).squeeze(0) for part in parts]
    return label, parts[0], parts[1]


def parse_required_inputs(
    model_out: Outputs,
    required_inputs_list: Sequence[str],
    ndcg_transform_input: bool = False,
    device: torch.device | None = None,
) -> ByTask:
    """Further outputs of the model by name.

    Args:
        model_out: the outputs.
        required_inputs_list: their names.
        ndcg_transform_input: must be False.
        device: where they are moved.

    Raises:
        ValueError: a transformation, which is not offered.
        KeyError: an output is missing.
    """
    if ndcg_transform_input:
        raise ValueError("ndcg_transform_input: pass session ids as integers; session_ids_to_tensor makes them")
    found = {name: model_out[name].squeeze() for name in required_inputs_list}
    return found if device is None else {name: value.to(device) for name, value in found.items()}


def parse_task_model_outputs(
    tasks: Sequence[RecTaskInfo], model_out: Outputs, required_inputs_list: Sequence[str] | None = None
) -> tuple[ByTask, ByTask, ByTask, ByTask]:
    """Labels, predictions and weights by the tasks' names, and required inputs by theirs. Tasks of an empty batch are
    left out.

    Raises:
        ValueError: an output of a task is missing, or of another size than its label.
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
            for found, part in ((labels, label), (predictions, prediction), (weights, weight)):
                if part is not None:
                    found[task.name] = part
    required = parse_required_inputs(model_out, required_inputs_list) if required_inputs_list else {}
    return labels, predictions, weights, required


def session_ids_to_tensor(session_ids: Sequence[str], device: torch.device | None = None) -> torch.Tensor:
    """Numbers of sessions from 1, int64: a new one wherever the id changes."""
    changes = [before != now for before, now in zip(session_ids, session_ids[1:], strict=False)]
    first = [1] if session_ids else []
    return torch.tensor([*first, *changes], dtype=torch.int64, device=device).cumsum(0)
