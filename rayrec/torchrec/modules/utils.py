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
        ValueError: it takes nothing, and gives no module.
    """
    if isinstance(module_or_callable, nn.Module):
        return module_or_callable
    try:
        made = module_or_callable()  # type: ignore[call-arg]
    except TypeError as error:
        if "argument" not in str(error):
            raise
        return module_or_callable  # type: ignore[return-value]
    if not isinstance(made, nn.Module):
        raise ValueError(f"{module_or_callable!r} takes no argument, so that it must make an nn.Module, not {made!r}")
    return made


def get_module_output_dimension(module: nn.Module | TensorFunction, in_features: int) -> int:
    """Width of a module's output for an input `[1, in_features]`."""
    return module(torch.zeros(1, in_features)).shape[-1]


def check_module_output_dimension(module: nn.Module | Iterable[nn.Module], in_features: int, out_features: int) -> bool:
    """Whether a module, or each of several, maps `in_features` numbers to `out_features`."""
    if isinstance(module, nn.ModuleList) or not isinstance(module, nn.Module):
        return all(get_module_output_dimension(each, in_features) == out_features for each in module)
    return get_module_output_dimension(module, in_features) == out_features


def init_mlp_weights_xavier_uniform(m: nn.Module) -> None:
    """For `model.apply`: Xavier-uniform weights and zero biases of linear layers."""
    if isinstance(m, nn.Linear):
        nn.init.xavier_uniform_(m.weight)
        if m.bias is not None:
            nn.init.zeros_(m.bias)


def construct_modulelist_from_single_module(module: nn.Module, sizes: Sequence[int]) -> nn.Module:
    """Copies of a module with Xavier-uniform weights, in nested lists of the given sizes."""
    if len(sizes) > 1:
        return nn.ModuleList(construct_modulelist_from_single_module(module, sizes[1:]) for _ in range(sizes[0]))
    return nn.ModuleList(copy.deepcopy(module).apply(init_mlp_weights_xavier_uniform) for _ in range(sizes[0]))


def convert_list_of_modules_to_modulelist(modules: Iterable[nn.Module], sizes: Sequence[int]) -> nn.Module:
    """Modules (or lists of them) as nested module lists of the given sizes.

    Raises:
        ValueError: another number of modules.
    """
    given = list(modules)
    if len(given) != sizes[0]:
        raise ValueError(f"{len(given)} modules for a list of {sizes[0]}")
    if len(sizes) == 1:
        return nn.ModuleList(given)
    return nn.ModuleList(convert_list_of_modules_to_modulelist(part, sizes[1:]) for part in given)  # type: ignore[arg-type]


def construct_jagged_tensors(
    embeddings: torch.Tensor, features: KeyedJaggedTensor, embedding_names: Sequence[str], need_indices: bool = False
) -> dict[str, JaggedTensor]:
    """Vectors `[N, D]` of all ids, cut by feature.

    Args:
        embeddings: in the order of the features' ids.
        embedding_names: a name for each feature's part.
        need_indices: the parts' weights hold the ids.
    """
    blocks = embeddings.split(features.length_per_key())
    parts = [features.feature(place) for place in range(len(features.keys()))]
    return {
        name: JaggedTensor(block, part.values() if need_indices else None, part.lengths())
        for name, block, part in zip(embedding_names, blocks, parts, strict=True)
    }
