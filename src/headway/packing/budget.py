"""What a pack may hold, and what a sample takes of it."""

from dataclasses import dataclass
from typing import NamedTuple

from headway.errors import ConfigError


class Size(NamedTuple):
    """What a sample takes of a pack, or what is left in one.

    Attributes:
        tokens: length [tokens].
        patches: vision patches of its images and videos [patches].
    """

    tokens: int
    patches: int = 0


@dataclass(frozen=True, slots=True)
class Budget:
    """What a pack holds.

    Attributes:
        tokens: the most tokens [tokens].
        patches: the most vision patches [patches]; None sets no limit.
        items: the most samples; None sets no limit.

    Raises:
        ConfigError: a budget below 1 token, below 0 patches or below 1 sample.
    """

    tokens: int
    patches: int | None = None
    items: int | None = None

    def __post_init__(self) -> None:
        if (
            self.tokens < 1
            or (self.patches is not None and self.patches < 0)
            or (self.items is not None and self.items < 1)
        ):
            raise ConfigError(
                f"A pack's budget is {self.tokens} tokens, {self.patches} patches and {self.items} samples; it needs "
                "at least 1 token, and patches of 0 or more and samples of 1 or more (or none for no limit)."
            )

    def holds(self, size: Size) -> bool:
        """Whether one sample of this size fits an empty pack."""
        return size.tokens <= self.tokens and (self.patches is None or size.patches <= self.patches)


def over_budget(what: str, size: Size, budget: Budget) -> str:
    """The sentence that tells a person that a sample exceeds a pack, and what can be done."""
    limit = f"{budget.tokens} tokens" + (f" and {budget.patches} patches" if budget.patches is not None else "")
    return (
        f"{what} has {size.tokens} tokens and {size.patches} vision patches, more than a pack's budget of {limit}. "
        "Raise the budget, shrink the images, or choose what to do with over-long samples (data.overlong, --overlong): "
        '"drop" leaves them out, "truncate" cuts their text, "split" makes several of a long text; all are counted and '
        "reported."
    )
