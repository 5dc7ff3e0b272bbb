"""Code that a plan prices: Headway's own, or another tool's engine, by a row of `engines.toml`."""

import difflib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any, Literal

from headway.config import TrainConfig, changed_config
from headway.count import CostModel, Workload
from headway.devices import Device
from headway.errors import ConfigError
from headway.predict.speeds import ATTENTION_KERNELS, Shape, Speeds

Update = Literal["separate", "one pass"]
"""Kernels of an optimizer for numbers in other types than float32: one for each operation, or one for all."""
FLEX = 0.87
"""Rate of FlexAttention over FlashAttention-2's: 90 % in forward, 85 % in backward.

Source: PyTorch's announcement, pytorch.org/blog/flexattention, 2024-08-07.
"""


@dataclass(frozen=True, slots=True)
class Float8:
    """Casts and products of linear layers in float8, by a row of `float8.toml`, which says what each number is."""

    input_bytes: int
    gradient_bytes: int
    weight_bytes: int
    source: str
    read_on: date
    result_bytes: int = 0
    gathers: bool = False
    casts_each_step: bool = False
    rate: float = 1.0
    copies: bool = False

    def moved_bytes(self, phase: str, shape: Shape, shards: int, packs: int) -> float:
        """Bytes that casts and scales of one product move.

        Args:
            phase: forward, recompute, dgrad or wgrad; forward has the casts of a layer's input and weight, dgrad those
                of the gradient.
            shape: of the product.
            shards: processes that gather its weight from one another; 1 where none is gathered.
            packs: of a step.

        >>> float8_of("megatron").moved_bytes("forward", (8192, 4096, 4096), shards=1, packs=4) / 2**20
        144.0
        """
        m, k, n = shape
        if phase in ("dgrad", "wgrad"):
            return (self.gradient_bytes * m * k if phase == "dgrad" else 0) + self.result_bytes * m * n
        weights = k * n / (packs if self.casts_each_step else 1) / (shards if self.gathers else 1)
        return self.input_bytes * m * k + self.weight_bytes * weights


@dataclass(frozen=True)
class Engine:
    """Settings, kernels and rates of the code that runs a recipe.

    Attributes:
        title: name and version for people.
        settings: of the recipe, where it names none of its own.
        update: kernels of the optimizer; None for Headway's own, which its rule and the types of its numbers decide.
        attention: kernel of attention, as the table of devices names it, or "flex"; None for `speed.attention`.
        fuses_loss: whether one kernel makes the loss and its slopes of logits; None for what the recipe's kernels do.
        sorts_rows: whether rows for experts are sorted and added up by PyTorch's kernels, as Headway does; else the
            time of that is not known, and left out.
        ranks_of_token: processes that a token is sent to; None for those that keep any of its experts.
        bias_bytes: bytes that are moved for a number of a bias of experts, by the name of the parameter.
        logit_bytes: bytes of a logit that are held, or reserved, where the loss is fullest; None for what the recipe's
            loss holds.
        update_copies: copies of the weights that learn which the update makes; None for those of Headway's.
        keeps: linear modules whose results recomputation keeps besides attention's.
        float8: its products in float8, a row of `float8.toml`.
        time: of computing over what Headway's rates give, by kind of model and precision, such as "experts fp8".
        source: where this was read.
        rates_source: published runs to which `time` is fitted.
        read_on: day of reading.
    """

    title: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    update: Update | None = "one pass"
    attention: str | None = None
    fuses_loss: bool | None = None
    sorts_rows: bool = True
    ranks_of_token: int | None = None
    bias_bytes: Mapping[str, int] = field(default_factory=dict)
    logit_bytes: int | None = None
    update_copies: int | None = None
    keeps: tuple[str, ...] = ()
    float8: str = "torchao-tensorwise"
    time: Mapping[str, float] = field(default_factory=dict)
    source: str = ""
    rates_source: str = ""
    read_on: date | None = None

    def speeds(self, speeds: Speeds, device: Device | None, cost_model: CostModel, *, float8: bool) -> Speeds:
        """Rates of a device with this engine's kernels.

        Args:
            speeds: of the device with Headway's.
            device: of the table; None for a machine that was measured, whose rates stay.
            cost_model: of the model.
            float8: whether blocks multiply in float8.

        Raises:
            ConfigError: its kernel of attention does not run on the device.
        """
        if device is None:
            return speeds
        kernel, share = ("fa2", FLEX) if self.attention == "flex" else (self.attention, 1.0)
        if kernel is not None and device.attention_shares:
            if kernel not in device.attention_shares:
                raise ConfigError(f"plan.engine: {self.title} runs {kernel}, which does not run on {device.title}.")
            share *= device.attention_shares[kernel] / device.attention_shares["fa2"]
            shares = speeds.attention_shares.times(share)
            speeds = replace(
                speeds, attention_shares=shares, attention_kernel=ATTENTION_KERNELS[kernel], short_attention=None
            )
        kind = "experts" if any(row.op == "experts" for row in cost_model.rows) else "dense"
        faster = 1 / self.time.get(f"{kind} {'fp8' if float8 else 'bf16'}", 1.0)
        return replace(
            speeds,
            product_shares=speeds.product_shares.times(faster),
            attention_shares=speeds.attention_shares.times(faster),
            bytes_per_s=speeds.bytes_per_s.times(faster),
        )

    def bytes_of_biases(self, cost_model: CostModel, pack: Workload) -> int:
        """Count the bytes that adding biases of experts moves for a pack, beyond what fused kernels move."""
        values = (
            num_bytes * parameter.active
            for parameter in cost_model.parameters
            for name, num_bytes in self.bias_bytes.items()
            if parameter.name.endswith(f"experts.{name}")
        )
        return sum(values) * pack.tokens


HEADWAY = Engine("headway train", update=None)


@cache
def engines() -> Mapping[str, Engine]:
    """Engines by the name that `plan.engine` gives them."""
    rows = _tables("engines").items()
    return {"headway": HEADWAY} | {name: Engine(**row | {"keeps": tuple(row.get("keeps", ()))}) for name, row in rows}


@cache
def float8_of(engine: str) -> Float8:
    """The products in float8 of an engine."""
    return Float8(**_tables("float8")[engine_named(engine).float8])


def _tables(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text("utf-8"))


def engine_named(name: str) -> Engine:
    """The engine of a name.

    Raises:
        ConfigError: there is none of that name.
    """
    table = engines()
    if name not in table:
        near = difflib.get_close_matches(name, table, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"plan.engine {name!r} is not known; known are {', '.join(table)}.{hint}")
    return table[name]


def with_engine(config: TrainConfig, warn: Callable[[str], None]) -> TrainConfig:
    """Lay the settings of the recipe's engine below its own: those that it names stay.

    Args:
        config: the recipe.
        warn: told of each setting that the recipe refuses, as one for several packs a step where there is one.

    Raises:
        ConfigError: `plan.engine` is not known.
    """
    name = config.plan.engine
    settings = engine_named(name).settings
    parts = {setting: setting.split(".") for setting in settings}
    for setting in [s for s, (section, key) in parts.items() if key not in getattr(config, section).model_fields_set]:
        try:
            config = changed_config(config, {setting: settings[setting]})
        except ConfigError as error:
            reason = " ".join(str(error).split()).rstrip(".")
            warn(f"plan.engine={name} without its {setting}={settings[setting]}, which this recipe refuses: {reason}.")
    return config
