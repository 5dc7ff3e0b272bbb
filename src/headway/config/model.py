"""The model: which one and what of it learns, how processes share it, and what makes its steps faster or smaller."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator

from headway.config.mistakes import describe_all
from headway.config.sections import FREE_ON_RESUME, Fraction, Positive, Section, Share, settings_off_default
from headway.count.quantised import Base
from headway.count.recompute import KINDS, is_for_training, towers
from headway.errors import ConfigError
from headway.packing.mesh import MeshShape
from headway.plugins import family_hook
from headway.report.quantity import SIZE_UNITS, bytes_in


class LoraConfig(Section):
    """Low-rank adapters: small matrices that learn beside frozen weights."""

    rank: Positive = Field(le=2**16, description="Inner dimension of the adapters")
    alpha: Share | None = Field(
        default=None, description="Scale of the adapters' outputs is alpha / rank. Null means alpha = rank"
    )
    dropout: Fraction = Field(
        default=0.0,
        lt=1.0,
        description="Share of an adapter's inputs that are zeroed in training. Each rank draws its own",
    )
    targets: tuple[str, ...] | None = Field(
        default=None,
        description="Linear modules with adapters, by last parts of names ('q_proj') or globs. Null means all except "
        "the head. Modules that model.freeze names get none",
    )

    @field_validator("targets")
    @classmethod
    def _all_of_them_is_the_default(cls, targets: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if targets in (("all-linear",), ("all",)) else targets


class ModelConfig(Section):
    """The model, and the part of it that learns."""

    path: str = Field(
        description="Folder, Hub id or config.json of a transformers causal or image-text model. A run folder stands "
        "for its newest export"
    )
    random_init: bool = Field(default=False, description="Start from random weights drawn with run.seed")
    freeze: tuple[str, ...] = Field(
        default=(),
        description="Parts that do not learn: components of the cost model ('vision', 'language.mlp') or globs over "
        "parameter names ('model.language_model.layers.0.*'). Each must match something",
    )
    flops: bool = Field(
        default=True,
        description="Count FLOPs. If false, a model that cannot be traced trains without FLOPs and MFU, and packs are "
        "balanced by tokens",
    )
    chat_template: str | None = Field(
        default=None,
        description="File of a Jinja chat template that replaces the model's own. Exports hold it. Null means the "
        "model's own",
    )
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(
        default={},
        description="Variables of the chat template, such as {enable_thinking: false}. A row's own chat_template_kwargs"
        " come first. Exports hold them",
    )
    new_tokens: tuple[str, ...] = Field(
        default=(),
        description="Tokens added to the tokenizer and the model, such as [<point>]. Their rows learn beside adapters "
        "too",
    )
    new_special_tokens: tuple[str, ...] = Field(
        default=(),
        description="Tokens added as markup, such as [<|call|>]. Answers in words leave them out",
    )
    lora: LoraConfig | None = Field(
        default=None,
        description="Train adapters instead of the weights. Null means none",
    )
    base: Base | None = Field(
        default=None,
        description="Precision of the frozen linear layers and experts beside adapters: 4 bits (nf4, QLoRA) or 8 "
        "(int8). Null means the dtype of the products",
    )
    dropout: Literal[True, False, "auto"] = Field(
        default="auto",
        description="Dropout of the model and of adapters in training. Auto means off if the objective compares two "
        "forwards, and on otherwise",
    )
    family: dict[str, bool | int | float | str] = Field(
        default={},
        description="Settings of a model family that a plug-in brings. Its page lists them",
    )
    _scores: bool = PrivateAttr(default=False)

    @model_validator(mode="after")
    def _tokens_are_new_to_each_other(self) -> Self:
        tokens = (*self.new_tokens, *self.new_special_tokens)
        for token in tokens:
            if not token.strip():
                raise ValueError(f"new_tokens names {token!r}, which has no letters. Take this token out")
            if tokens.count(token) > 1:
                raise ValueError(f"new_tokens names {token!r} {tokens.count(token)} times. Name each token once")
        return self

    @model_validator(mode="after")
    def _base_is_frozen(self) -> Self:
        if self.base is not None and self.lora is None:
            raise ValueError(
                f"base {self.base!r} holds weights that do not learn, but without model.lora all weights learn. Set "
                "model.lora.rank=16, or leave base out"
            )
        return self

    @property
    def adds_tokens(self) -> bool:
        """True if there are tokens to add."""
        return bool(self.new_tokens or self.new_special_tokens)

    @property
    def scores(self) -> bool:
        """True if it is trained as a reward model, with an output layer of one column in place of its own."""
        return self._scores

    @property
    def has_own_shape(self) -> bool:
        """True if it has other layers than what `path` names: rows of new tokens, or the head of a reward model."""
        return self.adds_tokens or self.scores

    def of_chats(self) -> dict[str, Any]:
        """The settings of how chats become text, as `headway.data.chat_settings.ChatSettings.of` takes them."""
        return {"file": self.chat_template, "variables": self.chat_template_kwargs}


class ParallelConfig(Section):
    """The mesh: replicate x shard x sequence processes; experts are spread over shard x sequence.

    Processes of one sequence group share a pack; every other process has packs of its own.
    """

    replicate: Positive = Field(default=1, description="Copies of the sharded weights (HSDP) [processes]")
    shard: Positive | Literal["auto"] = Field(
        default="auto", description="Processes that share one copy of the weights (FSDP2). Auto means all that are left"
    )
    sequence: Positive = Field(default=1, description="Processes that share each pack (Ulysses) [processes]")
    expert: Positive = Field(default=1, description="Processes that the experts of a layer are spread over [processes]")
    reshard: bool = Field(
        default=True,
        description="Free a block's gathered weights after its forward. False keeps them, which is faster if they fit",
    )
    reduce: Literal["pack", "step"] = Field(
        default="pack",
        description="Sum gradients over the processes after every pack, or once per step, which sends less and needs "
        "more memory",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Precision in which gradients are summed over the processes"
    )
    offload: bool = Field(
        default=False, description="Keep weights, gradients and optimizer states in the host's memory. CUDA only"
    )

    def with_copies(self, world_size: int) -> "ParallelConfig":
        """The same, with as many copies as processes leave where `shard` is a number and `replicate` says nothing."""
        if self.shard == "auto" or self.replicate != 1 or world_size % (self.shard * self.sequence):
            return self
        return self.model_copy(update={"replicate": world_size // (self.shard * self.sequence)})

    def mesh_shape(self, world_size: int) -> MeshShape:
        """Lay out so many processes.

        Raises:
            ConfigError: they do not fit.
        """
        return MeshShape.of(world_size, **self.model_dump(include={"replicate", "shard", "sequence", "expert"}))


class SpeedConfig(Section):
    """Compilation, kernels and recomputation."""

    compile: Literal[True, False, "auto"] = Field(
        default="auto",
        description="Compile every block with torch.compile, once for packs of every size. Auto means true on CUDA",
    )
    recompiles: Annotated[Literal["warn", "error"], FREE_ON_RESUME] = Field(
        default="warn",
        description="Warn of a compilation after a block's first two forwards, or end the run. Each is counted and "
        "named",
    )
    recompute: Annotated[str, FREE_ON_RESUME] = Field(
        default="none",
        description="Blocks that are recomputed in backward: none, full, every:N (every N-th block), memory:SIZE (as "
        "little as lets activations fit SIZE), or vision:full and such for one tower. Commas join choices. "
        ",-attention ,-projections ,-mlp keep these outputs",
    )
    offload: Annotated[Literal["none", "inputs"], FREE_ON_RESUME] = Field(
        default="none",
        description="Keep the inputs of recomputed blocks in the host's memory until backward. They are copied while "
        "blocks compute",
    )
    kernels: Literal["auto", "torch", "liger"] = Field(
        default="auto",
        description="Kernels of norms, gated MLPs, rotary embeddings and the loss. Auto means Liger's, except for the "
        "loss, if Liger is installed and blocks are not compiled",
    )
    attention: Literal["auto", "torch", "fa3", "cudnn", "flash-attn"] = Field(
        default="auto",
        description="Kernel of attention on CUDA: PyTorch's FlashAttention-2, FlashAttention-3, cuDNN's, or that of "
        "the package flash-attn. Auto means the first of fa3, cudnn and torch that runs",
    )
    loss_chunk: Positive | None = Field(
        default=2048,
        description="Labelled slots whose logits are in memory at a time. Liger's loss chooses its own. Null means "
        "logits of the whole pack, also where nothing is learnt [slots]",
    )

    @field_validator("recompute")
    @classmethod
    def _recompute_is_understood(cls, recompute: str) -> str:
        if not is_for_training(recompute) and _size(recompute) is None:
            raise ValueError(
                f"{recompute!r} is not none, full, every:N, one of these for a tower ({', '.join(towers())}) as "
                f"vision:full, any with {', '.join(f',-{kind}' for kind in KINDS)} behind it, or memory:SIZE with a "
                f"size such as 40GiB; units are {', '.join(SIZE_UNITS)}"
            )
        return recompute

    @model_validator(mode="after")
    def _recompiles_are_of_something_compiled(self) -> Self:
        if self.compile is False and "recompiles" in settings_off_default(self):
            raise ValueError("recompiles has no effect with compile: false")
        return self

    @model_validator(mode="after")
    def _offloaded_blocks_are_recomputed(self) -> Self:
        if self.offload != "none" and self.recompute == "none":
            raise ValueError(
                "offload has no effect with recompute: none, because it moves the inputs of recomputed blocks"
            )
        return self

    @model_validator(mode="after")
    def _chunks_are_ours(self) -> Self:
        if self.kernels == "liger" and self.loss_chunk is not None and "loss_chunk" in settings_off_default(self):
            raise ValueError(
                "loss_chunk has no effect with kernels 'liger', because Liger chooses its own. Leave loss_chunk out"
            )
        return self

    def is_fused(self, device: str) -> bool:
        """Tell whether elementwise operations are fused, so that backward keeps less, as far as settings alone tell.

        Args:
            device: as in `run.device`; auto is taken for CUDA, as what is planned for has it.
        """
        compiled = not device.startswith("cpu") if self.compile == "auto" else self.compile
        return compiled or self.kernels == "liger"

    @property
    def recompute_bytes(self) -> int | None:
        """Limit of `memory:SIZE` for activations kept from forward to backward on each device [bytes]; None without."""
        return _size(self.recompute)


def _size(recompute: str) -> int | None:
    return bytes_in(recompute.removeprefix("memory:")) if recompute.startswith("memory:") else None


def family_settings(values: Mapping[str, Any], architecture: Any) -> Section | None:
    """Read `model.family` as the settings of the model's family.

    Args:
        values: the section.
        architecture: the model's configuration.

    Returns:
        The family's own section; None of a model whose family has none.

    Raises:
        ConfigError: the family has no such settings, or no values like these.
    """
    section = family_hook(architecture, "settings")
    if section is None:
        if values:
            raise ConfigError(
                f"model.family.{next(iter(values))} has no effect: models of type {architecture.model_type!r} have "
                "no settings of their own. Take it out."
            )
        return None
    try:
        settings: Section = section.model_validate(dict(values))
    except ValidationError as error:
        mistakes = "; ".join(describe_all(error.errors(include_url=False), section))
        raise ConfigError(f"model.family: {mistakes}{'' if mistakes.endswith('?') else '.'}") from error
    return settings
