"""Which model is trained, and which part of it learns."""

from pydantic import Field

from headway.train.config.sections import Fraction, Positive, Section, Share


class LoraConfig(Section):
    """Low-rank adapters: small matrices that learn beside frozen weights."""

    rank: Positive = Field(le=2**16, description="Inner dimension of the adapters")
    alpha: Share | None = Field(
        default=None, description="Adapters' outputs are scaled by alpha / rank; null for rank, a scale of 1"
    )
    dropout: Fraction = Field(
        default=0.0, lt=1.0, description="Share of an adapter's inputs that are zeroed in training; drawn per rank"
    )
    targets: tuple[str, ...] | None = Field(
        default=None,
        description="Linear modules that take one: last parts of their names ('q_proj') or globs over names; null for "
        "all but the head. Modules that model.freeze names take none",
    )


class ModelConfig(Section):
    """Which model, and which part of it learns."""

    path: str = Field(description="Folder, Hub id or config.json of a transformers causal or image-text model")
    random_init: bool = Field(default=False, description="Start from random weights drawn with run.seed")
    freeze: tuple[str, ...] = Field(
        default=(),
        description="What does not learn: components of the ledger ('vision', 'language.mlp') or globs over parameter "
        "names ('model.language_model.layers.0.*'); each must match something",
    )
    lora: LoraConfig | None = Field(default=None, description="Train adapters instead of the weights; null for none")
