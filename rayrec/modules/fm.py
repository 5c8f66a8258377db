"""Factorization machines: the sum of all pairwise products, without the pairs."""

from __future__ import annotations

import torch


def pairwise_sum(vectors_BFD: torch.Tensor) -> torch.Tensor:
    """Σ_{i<j} <v_i, v_j> for every example, `[B]`, in time linear in F (Rendle 2010, equation 5)."""
    square_of_sum_BD = vectors_BFD.sum(1).square()
    sum_of_squares_BD = vectors_BFD.square().sum(1)
    return (square_of_sum_BD - sum_of_squares_BD).sum(1) / 2
