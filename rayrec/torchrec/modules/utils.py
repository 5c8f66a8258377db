"""Helpers for custom modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from rayrec.torchrec.not_offered import names_left_out
from rayrec.torchrec.sparse import JaggedTensor, KeyedJaggedTensor

__getattr__ = names_left_out(__name__)

TensorFunction = Callable[[torch.Tensor], torch.Tensor]


def extract_module_or_tensor_callable(
    module_or_callable: nn.Module | Callable[[], nn.Module] | TensorFunction,
) -> nn.Module | TensorFunction:
    """Returns a module or a function of a tensor unchanged, and calls a factory of modules.

    Raises:
        ValueError: a callable without arguments that does not return a module.
    """
    if isinstance(module_or_callable, nn.Module):
        return module_or_callable
    try:
        module = module_or_callable()  # type: ignore[call-arg]
    except TypeError as error:
        if "argument" not in str(error):
            raise
        return module_or_callable  # type: ignore[return-value]
    if not isinstance(module, nn.Module):
        raise ValueError(f"{module_or_callable!r} takes no argument, so it must return an nn.Module, not {module!r}")
    return module


def get_module_output_dimension(module: nn.Module | TensorFunction, in_features: int) -> int:
    """Returns the output width of a module for an input `[1, in_features]`."""
    return module(torch.zeros(1, in_features)).shape[-1]


def check_module_output_dimension(module: nn.Module | Iterable[nn.Module], in_features: int, out_features: int) -> bool:
    """Whether a module, or each of several modules, maps width `in_features` to `out_features`."""
    if isinstance(module, nn.ModuleList) or not isinstance(module, nn.Module):
        return all(get_module_output_dimension(item, in_features) == out_features for item in module)
    return get_module_output_dimension(module, in_features) == out_features


def init_mlp_weights_xavier_uniform(m: nn.Module) -> None:
    """Sets Xavier-uniform weights and zero biases of a linear layer; for `model.apply`."""
    if isinstance(m, nn.Linear):
        nn.init.xavier_uniform_(m.weight)
        if m.bias is not None:
            nn.init.zeros_(m.bias)


def construct_modulelist_from_single_module(module: nn.Module, sizes: Sequence[int]) -> nn.Module:
    """Returns copies of a module with Xavier-uniform weights, in nested module lists of these sizes."""
    if len(sizes) > 1:
        return nn.ModuleList(construct_modulelist_from_single_module(module, sizes[1:]) for _ in range(sizes[0]))
    return nn.ModuleList(copy.deepcopy(module).apply(init_mlp_weights_xavier_uniform) for _ in range(sizes[0]))


def convert_list_of_modules_to_modulelist(modules: Iterable[nn.Module], sizes: Sequence[int]) -> nn.Module:
    """Converts nested lists of modules to module lists of these sizes.

    Raises:
        ValueError: another number of modules.
    """
    items = list(modules)
    if len(items) != sizes[0]:
        raise ValueError(f"{len(items)} modules for a list of {sizes[0]}")
    if len(sizes) == 1:
        return nn.ModuleList(items)
    return nn.ModuleList(convert_list_of_modules_to_modulelist(item, sizes[1:]) for item in items)  # type: ignore[arg-type]


def construct_jagged_tensors(
    embeddings: torch.Tensor, features: KeyedJaggedTensor, embedding_names: Sequence[str], need_indices: bool = False
) -> dict[str, JaggedTensor]:
    """Splits the vectors `[N, D]` of all ids by feature.

    Args:
        embeddings: the vectors, in the order of the ids.
        features: the ids.
        embedding_names: the name of each feature in the output.
        need_indices: store the ids as weights of the output.
    """
    blocks = embeddings.split(features.length_per_key())
    ids = [features.feature(index) for index in range(len(features.keys()))]
    return {
        name: JaggedTensor(block, jagged.values() if need_indices else None, jagged.lengths())
        for name, block, jagged in zip(embedding_names, blocks, ids, strict=True)
    }
