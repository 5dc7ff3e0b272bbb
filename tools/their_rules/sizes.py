"""What a tool asks of a run, read off the configuration's object, apart from the package's own reader."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from tools.their_rules.cases import WITHOUT_GATE, hf_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from tools.their_rules.cases import Case
    from tools.their_rules.checkouts import Checkouts, Source

    Count: TypeAlias = Callable[[Case], float | None]  # FLOPs of a case; None where the tool has no number
    Make: TypeAlias = Callable[[Checkouts, Source], Count]  # compiles a tool's function


class NotTheirsError(Exception):
    """The tool does not train the model, or its term for such layers is kept in no row: there is nothing to compare."""


def nothing(*_: object) -> bool:
    """Stand in for what a function asks or tells besides counting."""
    return False


@dataclass(frozen=True)
class Sizes:
    """What Megatron's and MaxText's users set by flags for a model, read off its configuration."""

    case: Case

    @cached_property
    def top(self) -> Any:
        """Whole configuration, as an object of transformers."""
        return hf_config(self.case.model)

    @cached_property
    def text(self) -> Any:
        """Configuration of the language model."""
        return self.top.get_text_config()

    @property
    def kind(self) -> str:
        """Type of the model."""
        return str(self.top.model_type)

    @property
    def gated(self) -> bool:
        """Whether its MLPs have a gate."""
        return self.kind not in WITHOUT_GATE

    @property
    def head_dim(self) -> int:
        """Size of a query-key head."""
        return int(getattr(self.text, "head_dim", None) or self.text.hidden_size // self.text.num_attention_heads)

    @property
    def groups(self) -> int:
        """Key-value heads."""
        return int(getattr(self.text, "num_key_value_heads", None) or self.text.num_attention_heads)

    @property
    def ffn(self) -> int:
        """Inner width of a dense MLP."""
        names = ("intermediate_size_mlp", "intermediate_size", "ffn_dim")
        found = next((int(value) for name in names if (value := getattr(self.text, name, None))), 0)
        return found or 4 * int(self.text.hidden_size)

    @property
    def experts(self) -> int:
        """Routed experts of a layer; 0 for a dense model."""
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        return next((int(value) for name in names if (value := getattr(self.text, name, None))), 0)

    @property
    def expert_ffn(self) -> int:
        """Inner width of a routed expert."""
        width = getattr(self.text, "moe_intermediate_size", None) or getattr(self.text, "intermediate_size", None)
        return int(width or self.ffn)

    @property
    def shared_ffn(self) -> int:
        """Inner width of all shared experts together."""
        width = getattr(self.text, "shared_expert_intermediate_size", None) or 0
        return int(width or (getattr(self.text, "n_shared_experts", None) or 0) * self.expert_ffn)

    @property
    def dense_first(self) -> int:
        """Layers without experts before the others."""
        return int(getattr(self.text, "first_k_dense_replace", None) or 0)

    @property
    def is_latent(self) -> bool:
        """Whether attention is multi-head latent."""
        return bool(getattr(self.text, "kv_lora_rank", None))

    @property
    def has_delta_rule(self) -> bool:
        """Whether some layers are of the gated delta rule."""
        return bool(getattr(self.text, "linear_num_value_heads", None))

    @property
    def prediction_layers(self) -> int:
        """Layers of multi-token prediction that the configuration announces."""
        return int(self.case.config.get("num_nextn_predict_layers") or 0)
