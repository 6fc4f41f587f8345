"""Router: the rule by which a mixture chooses the experts of a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

MAX_EXPERTS = 1024
"""The largest number of experts: a program holds all scores of a token."""


@dataclass(frozen=True)
class Router:
    """The rule by which a router chooses top_k experts from logits and weighs them.

    weight       [num_experts, hidden_size], bias [num_experts] or None: logits = x @ weight.T + bias
    score        the function of the logits before the choice; "logits" is the identity
    correction   float [num_experts] or None: added to the scores for the choice alone (DeepSeek-V3)
    num_groups, top_groups  only experts of the best groups are chosen; 1 and 1 for all experts
    group_score  the score of a group: of its best expert, or the sum of its two best
    after        the function of the chosen scores
    renormalize  whether weights are divided by their sum (plus eps)
    scale        of the weights, last
    logits_dtype the dtype to which the model rounds logits
    """

    weight: torch.Tensor
    top_k: int
    bias: torch.Tensor | None = None
    score: Literal["softmax", "sigmoid", "logits"] = "softmax"
    correction: torch.Tensor | None = None
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "two"] = "two"
    after: Literal["none", "softmax", "sigmoid"] = "none"
    renormalize: bool = False
    eps: float = 0.0
    scale: float = 1.0
    logits_dtype: torch.dtype = torch.float32
