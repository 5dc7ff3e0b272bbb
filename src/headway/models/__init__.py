"""Models: opening them (`load`) and the attention that keeps a pack's segments apart (`attention`).

`load_config`, `load_model` and `load_processor` take a folder, a config.json or a Hub name. `register` makes the
attention backend "headway_flash" known to transformers; `load_model` calls it by itself.
"""

from headway.models.attention import register_attention, use_attention
from headway.models.load import check_weights, load_model, load_model_config, load_processor, rope_index

__all__ = [
    "check_weights",
    "load_model",
    "load_model_config",
    "load_processor",
    "register_attention",
    "rope_index",
    "use_attention",
]
