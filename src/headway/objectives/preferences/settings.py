"""The section on preference training: which loss, how strong, and what answers are compared with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from headway.config.objective import ObjectiveSection
from headway.config.sections import Fraction, Share, settings_off_default


@dataclass(frozen=True)
class PairLoss:
    """Facts of a loss of pairs of answers; `losses.LOSSES` has its function.

    Attributes:
        source: paper and equation.
        refers: whether it compares with a reference.
        scores: whether it compares scores of a reward model, rather than log-probabilities.
        unpaired: whether each answer counts by itself, as wished for or not.
        per_token: whether rewards are means over an answer's targets, and not sums.
        settings: settings that it takes beside beta, and beside sft if it is of pairs of log-probabilities.
        beta: what beta is unless a run says otherwise.
        sft: likewise, the factor on the mean cross-entropy of the best answers.
    """

    source: str
    refers: bool = True
    scores: bool = False
    unpaired: bool = False
    per_token: bool = False
    settings: tuple[str, ...] = ()
    beta: float = 0.1
    sft: float = 0.0


PAIR_LOSSES: Mapping[str, PairLoss] = {
    "sigmoid": PairLoss(
        "Rafailov et al. 2023, arXiv:2305.18290, equation 7; label_smoothing: Mitchell 2023, A note on DPO with noisy "
        "preferences",
        settings=("label_smoothing",),
    ),
    "robust": PairLoss("Chowdhury et al. 2024, arXiv:2403.00409", settings=("label_smoothing",)),
    "hinge": PairLoss("Zhao et al. 2023, arXiv:2305.10425, with the margin of DPO"),
    "ipo": PairLoss("Azar et al. 2023, arXiv:2310.12036, equation 17, of log-ratios per token"),
    "sigmoid_norm": PairLoss(
        "Lambert et al. 2024, arXiv:2411.15124, length-normalised DPO", settings=("label_smoothing",), beta=5.0
    ),
    "orpo": PairLoss("Hong et al. 2024, arXiv:2403.07691, equations 4, 6 and 7", refers=False, per_token=True, sft=1.0),
    "simpo": PairLoss(
        "Meng et al. 2024, arXiv:2405.14734, equation 6",
        refers=False,
        per_token=True,
        settings=("label_smoothing", "gamma"),
        beta=2.0,
    ),
    "kto": PairLoss(
        "Ethayarajh et al. 2024, arXiv:2402.01306, equation 7",
        unpaired=True,
        settings=("weights",),
    ),
    "apo_zero_unpaired": PairLoss(
        "D'Oosterlinck et al. 2024, arXiv:2408.06266, APO-zero, as TRL has it of single answers",
        unpaired=True,
        settings=("weights",),
    ),
    "reward": PairLoss(
        "Bradley and Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, equation 1; center: Eisenstein et al. 2023, "
        "arXiv:2312.09244",
        refers=False,
        scores=True,
        settings=("center",),
        beta=1.0,
    ),
}
"""Losses of pairs by their names."""


class PreferenceConfig(ObjectiveSection):
    """Training on answers of which some are better than others (DPO and its kin)."""

    loss: str = Field(
        default="sigmoid",
        description="Loss of pairs: sigmoid (DPO), robust, hinge, ipo, sigmoid_norm (DPO per token), orpo or simpo. "
        "Loss of single answers: kto or apo_zero_unpaired. reward trains a reward model. "
        "docs/preferences.md has their formulas",
    )
    beta: Share | None = Field(
        default=None,
        description="Strength of the pull to the reference, or of the margin. Null means 0.1, or 5 for sigmoid_norm "
        "and 2 for simpo",
    )
    label_smoothing: Fraction = Field(
        default=0.0, lt=0.5, description="Share of the pairs whose order is assumed to be wrong"
    )
    gamma: float = Field(default=0.5, ge=0.0, description="Margin that simpo asks of the better answer")
    center: float = Field(
        default=0.0, ge=0.0, description="Factor on the squared sum of a pair's rewards, which draws them towards zero"
    )
    weights: tuple[Share, Share] = Field(
        default=(1.0, 1.0),
        description="Factors on the losses of good and of bad answers (kto)",
    )
    sft: float | None = Field(
        default=None,
        ge=0.0,
        description="Factor on the mean cross-entropy of the better answers, which is added to the loss. Null means 0, "
        "or 1 for orpo",
    )
    reference: Literal["stored", "adapters-off", "none"] | None = Field(
        default=None,
        description="Reference of the log-ratios. stored means log-probabilities under the initial weights, computed "
        "once. adapters-off means the model without its adapters, at each step. Null means stored if the "
        "loss has a reference",
    )

    shared_prompts: Literal[True, False, "auto"] = Field(
        default="auto",
        description="Compute a prompt once for all of its answers, instead of once before each. Auto means if the "
        "model's attention allows it",
    )

    @field_validator("loss")
    @classmethod
    def _loss_is_known(cls, loss: str) -> str:
        if loss not in PAIR_LOSSES:
            raise ValueError(f"give one of {', '.join(PAIR_LOSSES)}")
        return loss

    @property
    def row(self) -> PairLoss:
        """Facts of the loss."""
        return PAIR_LOSSES[self.loss]

    @property
    def strength(self) -> float:
        """Beta, as the run or the loss says."""
        return self.row.beta if self.beta is None else self.beta

    @property
    def sft_weight(self) -> float:
        """Factor on the mean cross-entropy of the best answers, likewise."""
        return self.row.sft if self.sft is None else self.sft

    @property
    def compares_with(self) -> Literal["stored", "adapters-off", "none"]:
        """The reference, as the run or the loss says."""
        return self.reference or ("stored" if self.row.refers else "none")

    @property
    def drops(self) -> bool:
        """False: answers are compared by what the model says of them without chance."""
        return False

    @property
    def compares_forwards(self) -> bool:
        """True where there is a reference."""
        return self.compares_with != "none"

    @property
    def shares_prompts(self) -> bool:
        """True unless a run switches it off."""
        return self.shared_prompts is not False

    @property
    def weighs_slots(self) -> bool:
        """True of losses of log-probabilities."""
        return not self.row.scores

    @property
    def scores(self) -> bool:
        """True of reward models."""
        return self.row.scores

    def check(self, config: Any) -> None:
        """Refuse settings of other sections that cannot go with preferences; see `ObjectiveSection.check`."""
        data = config.data
        policies = {part.overlong or data.overlong for stage in data.played for part in stage.parts}
        if self.row.unpaired and "split" in policies:
            raise ValueError(
                f"overlong 'split' would cut an answer into several rows, but preference.loss {self.loss!r} needs "
                "whole answers. Use 'truncate' or 'drop'"
            )
        if self.row.scores and "loss_chunk" in settings_off_default(config.speed):
            raise ValueError(
                f"speed.loss_chunk has no effect with preference.loss {self.loss!r}, because its head has one "
                "column. Leave it out"
            )
        if self.compares_with == "adapters-off" and config.model.lora is None:
            raise ValueError(
                "preference.reference 'adapters-off' needs adapters to switch off. Set model.lora, or use 'stored'"
            )
        if config.eval.generate is not None:
            raise ValueError(
                "eval.generate writes answers to chats, but preference trains on pairs. Leave eval.generate out"
            )
        if self.compares_with == "stored" and data.stream is not None:
            raise ValueError(
                "preference.reference 'stored' needs the rows of an index, but data.stream has no index. Leave "
                "data.stream out, or use 'adapters-off' with model.lora"
            )

    @staticmethod
    def _reads(row: PairLoss, setting: str) -> bool:
        of_pairs = not (row.scores or row.unpaired)
        common = {"beta": not row.scores, "sft": of_pairs, "shared_prompts": not row.unpaired}
        return setting in row.settings or common.get(setting, False)

    @model_validator(mode="after")
    def _everything_takes_effect(self) -> Self:
        for setting in sorted(settings_off_default(self) - {"loss", "reference"}):
            if not self._reads(self.row, setting):
                readers = [name for name, row in PAIR_LOSSES.items() if self._reads(row, setting)]
                raise ValueError(
                    f"{setting} has no effect with loss {self.loss!r}. Remove it, or use {' or '.join(readers)}"
                )
        if self.row.unpaired and self.compares_with == "none":
            raise ValueError(
                f"loss {self.loss!r} needs a reference. Leave the setting reference out, or use adapters-off"
            )
        if not self.row.refers and self.compares_with != "none":
            raise ValueError(
                f"reference {self.reference!r} has no effect with loss {self.loss!r}, because this loss has no "
                "reference. Leave it out"
            )
        return self
