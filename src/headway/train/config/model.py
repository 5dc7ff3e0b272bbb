"""Which model is trained, and which part of it learns."""

from pydantic import Field

from headway.train.config.sections import Section


class ModelConfig(Section):
    """Which model, and which part of it learns."""

    path: str = Field(description="Folder, Hub id or config.json of a transformers causal or image-text model")
    random_init: bool = Field(default=False, description="Start from random weights drawn with run.seed")
    freeze: tuple[str, ...] = Field(
        default=(),
        description="What does not learn: components of the ledger ('vision', 'language.mlp') or globs over parameter "
        "names ('model.language_model.layers.0.*'); each must match something",
    )
