"""The section `model.loss` of a train config: the fields of each kind of loss.

`RANKER_LOSSES` and `RETRIEVER_LOSSES` have the section of each kind. `loss.py` and `retrieval_loss.py` compute them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from rayrec._runtime.strict import Section, refusal
from rayrec.storage.errors import suggestion


class LossConfig(Section):
    """The loss."""

    kind: str = Field(description="the loss; the tables below list the fields of each kind")

    @property
    def by_group(self) -> bool:
        """Whether training compares the rows of a group of `schema.group`."""
        return False

    @property
    def compares_rows(self) -> bool:
        """Whether the loss of a row depends on other rows of the global batch."""
        return False


class Bce(LossConfig):
    """Binary cross-entropy. Numeric labels have the squared error."""

    kind: Literal["bce"] = "bce"
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """moves each label by half of this value towards the other one"""
    positive_weight: float = Field(default=1.0, gt=0)
    """weight of rows with label 1; rows with label 0 have 1. The predicted odds are this many times the true ones"""


class Focal(LossConfig):
    """Focal loss (Lin et al. 2017, arXiv:1708.02002): gives less weight to rows that are predicted well."""

    kind: Literal["focal"] = "focal"
    gamma: float = Field(default=2.0, ge=0)
    """exponent: multiplies the cross-entropy by `(1 - p)^gamma`, p the probability of the true label"""
    alpha: Annotated[float, Field(gt=0, lt=1)] | None = None
    """class weight: `alpha` for positives, `1 - alpha` for negatives; `null`: 1 for both"""


class Mse(LossConfig):
    """Squared error of the probability."""

    kind: Literal["mse"] = "mse"
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """moves each label by half of this value towards the other one"""


class Pairwise(LossConfig):
    """RankNet (Burges et al. 2005), within a group BPR (Rendle et al. 2009): positives should score above negatives.
    Scores rank rows and are not probabilities."""

    kind: Literal["pairwise"] = "pairwise"
    within: Literal["batch", "group"] = "batch"
    """pairs of a positive and a negative: all of a step, or those of one group of `schema.group`, such as a user or a
    request"""

    @property
    def by_group(self) -> bool:
        return self.within == "group"

    @property
    def compares_rows(self) -> bool:
        return True


class ListNet(LossConfig):
    """Cross-entropy of the positives under the softmax of each group's scores (Cao et al. 2007). Needs `schema.group`;
    rows of a group are compared if they are in one step. Scores rank rows and are not probabilities."""

    kind: Literal["listnet"] = "listnet"

    @property
    def by_group(self) -> bool:
        return True

    @property
    def compares_rows(self) -> bool:
        return True


class Huber(LossConfig):
    """Huber loss of numeric labels: squared error, linear for large errors."""

    kind: Literal["huber"] = "huber"
    delta: float = Field(default=1.0, gt=0, description="error above which the loss is linear")


class Poisson(LossConfig):
    """Poisson deviance of numeric labels of at least 0, such as counts; the prediction is e to the model's output."""

    kind: Literal["poisson"] = "poisson"


class Ziln(LossConfig):
    """Zero-inflated lognormal (Wang et al. 2019, arXiv:1912.07753) of one numeric label that is often 0, such as a
    value: the model has three outputs, and `over_arch` ends with 3. The prediction is the mean."""

    kind: Literal["ziln"] = "ziln"


class _Scores(LossConfig):
    temperature: Annotated[float, Field(gt=0)] | None = None
    """divides the scores; `null`: 0.05 if the model normalizes vectors to length 1, else 1"""

    @property
    def compares_rows(self) -> bool:
        return True


class _Counts(_Scores):
    counts: Literal["data"] | list[Annotated[float, Field(ge=0)]] | None = None
    """occurrences of each item in the training rows: `data` counts them once at the start of the run, in at most about
    a million rows, and stores them in its checkpoints; a list has one number for each row of the item table"""
    seed: int = Field(default=0, ge=0, description="seed of the sampled items")


class _Sampled(_Counts):
    negatives: int = Field(default=256, ge=1)
    """items sampled in each step; all positions of all workers share them"""
    sampler: Literal["uniform", "popularity"] = "uniform"
    """probability of an item: the same for all, or by `counts`, which are then needed"""
    power: float = Field(default=1.0, ge=0)
    """exponent of the counts in `popularity`: 1: as in the data; 0: uniform"""

    @model_validator(mode="after")
    def _has_counts(self) -> _Sampled:
        if self.sampler == "popularity" and self.counts is None:
            raise ValueError("sampler popularity needs counts; set counts: data")
        return self


class _InBatch(_Counts):
    hard_negatives: bool = False
    """of `two_tower`: the items of rows with label 0, such as impressions without a click, are negatives too"""


class Softmax(_Scores):
    """Cross-entropy over all items. Exact; the time of a step grows with the number of items."""

    kind: Literal["softmax"] = "softmax"


class SampledSoftmax(_Sampled):
    """Cross-entropy over sampled items, with log q subtracted from the scores (Jean et al. 2015, arXiv:1412.2007)."""

    kind: Literal["sampled_softmax"] = "sampled_softmax"


class InBatch(_InBatch):
    """Cross-entropy over the positives of the global batch, with log q subtracted (Yi et al. 2019). Without `counts`, q
    is estimated in training."""

    kind: Literal["in_batch"] = "in_batch"


class Mixed(_Sampled, _InBatch):
    """Cross-entropy over sampled items and the positives of the batch (Yang et al. 2020)."""

    kind: Literal["mixed"] = "mixed"


class SampledBce(_Sampled):
    """Binary cross-entropy of the positive, plus the mean over sampled items (SASRec, arXiv:1808.09781)."""

    kind: Literal["bce"] = "bce"


class Gbce(_Sampled):
    """`bce` with the positive's probability to a power, against overconfidence (Petrov and Macdonald 2023,
    arXiv:2308.07192)."""

    kind: Literal["gbce"] = "gbce"
    calibration: float = Field(default=0.75, ge=0, le=1)
    """t of the paper: 0: plain `bce`; 1: unbiased probabilities"""


class Bpr(_Sampled):
    """Mean over sampled items of the log loss of ranking the positive above the item (Rendle et al. 2009)."""

    kind: Literal["bpr"] = "bpr"


def _by_kind(*sections: type[LossConfig]) -> dict[str, type[LossConfig]]:
    return {section.model_fields["kind"].default: section for section in sections}


RANKER_LOSSES = _by_kind(Bce, Focal, Mse, Pairwise, ListNet, Huber, Poisson, Ziln)
RETRIEVER_LOSSES = _by_kind(Softmax, SampledSoftmax, InBatch, Mixed, SampledBce, Gbce, Bpr)
NUMBER_LOSSES = (Huber, Poisson, Ziln)  # losses of numeric labels


def default_loss(model: str | None, retrievers: Mapping[str, Any]) -> LossConfig:
    """The loss of a config without `model.loss`."""
    if model not in retrievers:
        return Bce()
    return InBatch() if model == "two_tower" else SampledSoftmax()


def loss_of(given: Mapping[str, Any], model: str | None, retrievers: Mapping[str, Any]) -> LossConfig:
    """The section of plain values.

    Args:
        given: the fields; without `kind`, that of the default loss.
        model: name of the built-in model; None for a model of the user, which may have any loss.
        retrievers: the built-in models that have the losses of retrievers.

    Raises:
        PydanticCustomError: an unknown kind or field, or a wrong value; names it and what is allowed.
    """
    kind = given.get("kind", default_loss(model, retrievers).kind)
    allowed = RETRIEVER_LOSSES if model in retrievers else RANKER_LOSSES
    if model is None and (kind not in RANKER_LOSSES or "negatives" in given):
        allowed = {**RANKER_LOSSES, **RETRIEVER_LOSSES}
    if not isinstance(kind, str) or kind not in allowed:
        whose = "" if model is None else f" for model {model}"
        raise refusal(
            "model.loss.kind",
            f"got {kind!r}{suggestion(str(kind), allowed)}; allowed{whose}: {', '.join(allowed)}",
        )
    section = allowed[kind]
    try:
        return section(**{**given, "kind": kind})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(str(step) for step in problem["loc"] if isinstance(step, int) or step in given)
        if problem["type"] == "extra_forbidden":
            names = [name for name in section.model_fields if name != "kind"]
            has = f"it has {', '.join(names)}" if names else "it has no fields"
            text = f"the loss {kind} does not have this field{suggestion(field, names)} ({has})"
        else:
            message = problem["msg"].removeprefix("Value error, ")
            text = f"the loss {kind}: {message[:1].lower()}{message[1:]}"
        raise refusal(f"model.loss.{field}".rstrip("."), text) from None


def as_written(loss: LossConfig) -> dict[str, Any]:
    """The fields that differ from their defaults, with the kind, for messages."""
    return {"kind": loss.kind, **loss.model_dump(mode="json", exclude_defaults=True)}
