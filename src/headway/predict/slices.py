"""Slices of parameters: FSDP2 cuts them by rows, and fills the last ones up; experts may be spread beforehand."""

from collections import Counter
from dataclasses import replace

from headway.count import CostModel
from headway.count.activations import SavedActivations
from headway.count.rows import Parameter
from headway.count.units import block_of, head_features, remembered, unit_names

SPREAD = " (experts)"
"""Follows a block's name in that of the unit of its spread experts."""


def padding_of(cost_model: CostModel, shards: int, expert: int = 1) -> float:
    """Ratio of the weights that are held and gathered, padding included, to the model's: 1 where no slice is padded.

    Args:
        cost_model: of the model.
        shards: processes that hold one copy of the weights between them.
        expert: processes that the experts of a layer are spread over.
    """
    held: int = sliced(cost_model, shards, expert).params.total
    return held / max(1, cost_model.params.total)


@remembered
def sliced(cost_model: CostModel, shards: int, expert: int) -> CostModel:
    """Give each parameter the numbers that its slices hold together, with what fills the last ones up.

    FSDP2 cuts a tensor by its rows, so one with fewer rows than processes grows to a row for each of them, on the
    device as in a gather.

    Args:
        cost_model: of the model.
        shards: processes that hold one copy of the weights between them.
        expert: processes that the experts of a layer are spread over.
    """
    rows, found = rows_of(cost_model), []
    for one in cost_model.parameters:
        spread = spread_over(one, expert)
        numel = spread * rows.padded(one, shards, spread)
        found.append(replace(one, numel=numel, active=numel if one.active == one.numel else one.active))
    return replace(cost_model, parameters=tuple(found))


def spread_over(parameter: Parameter, expert: int) -> int:
    """Number of processes that each keep their own part of a parameter; 1 but for experts that tokens are routed to."""
    return expert if parameter.component.endswith(".experts") and parameter.active < parameter.numel else 1


@remembered
def trained_of_process(cost_model: CostModel, expert: int) -> int:
    """Count the weights that learn, of experts spread over so many processes those that one keeps."""
    return sum(p.numel // spread_over(p, expert) for p in cost_model.parameters if p.trainable)


@remembered
def numbers_by_unit(
    cost_model: CostModel, in_slices: CostModel, saved: SavedActivations, expert: int
) -> dict[str, tuple[int, int, int]]:
    """Numbers of each unit that FSDP2 gathers: what is gathered, and of what learns the whole gradient and its slices.

    Args:
        cost_model: of the model.
        in_slices: the same, `sliced`.
        saved: names its blocks.
        expert: processes that the experts of a layer are spread over.
    """
    gathered, learns, padded = Counter[str](), Counter[str](), Counter[str]()
    names = unit_names(cost_model, saved)
    for one, held, name in zip(cost_model.parameters, in_slices.parameters, names, strict=True):
        spread = spread_over(one, expert)
        unit = f"{name}{SPREAD}" if spread > 1 else name
        gathered[unit] += held.numel // spread
        if one.trainable:
            learns[unit] += one.numel // spread
            padded[unit] += held.numel // spread
    return {unit: (size, learns[unit], padded[unit]) for unit, size in gathered.items()}


@remembered
def values_of_spread(cost_model: CostModel, saved: SavedActivations, expert: int) -> Counter[str]:
    """By block, numbers per token that the products of spread experts read and give, which backward needs.

    Args:
        cost_model: of the model.
        saved: names its blocks.
        expert: processes that the experts of a layer are spread over.
    """
    features, rows = head_features(cost_model), rows_of(cost_model)
    found: Counter[str] = Counter()
    for parameter in cost_model.parameters:
        if features and spread_over(parameter, expert) > 1:
            width, count = features[0], rows.count(parameter)
            chosen, each = parameter.active * count // parameter.numel, parameter.numel // count
            found[block_of(parameter, saved)] += chosen * (width + each // width)
    return found


class Rows:
    """Rows of parameters, by which FSDP2 cuts them: each process has as many as any other, the last ones padded."""

    def __init__(self, cost_model: CostModel) -> None:
        self._linear = {f"{row.module}.weight": row.features for row in cost_model.rows if row.features}
        self._convolutions = {f"{row.module}.weight" for row in cost_model.rows if row.op == "convolution"}
        self._numel = {parameter.name: parameter.numel for parameter in cost_model.parameters}
        self._widest = max((max(pair) for pair in self._linear.values()), default=0)
        language = head_features(cost_model)
        self._widths = {"": language[0] if language else 0}
        for row in cost_model.rows:
            if row.features and row.block:
                tower = row.component.partition(".")[0]
                self._widths[tower] = min(row.features[0], self._widths.get(tower, row.features[0]))
        self._experts = self._numbers_of_experts(cost_model)

    def padded(self, parameter: Parameter, ranks: int, spread: int) -> int:
        """Numbers of a parameter, or of the part that one of `spread` processes keeps, in slices for `ranks`."""
        count = self.count(parameter)
        each = parameter.numel // count
        own = count // spread
        ranks //= spread
        return -(-own // ranks) * ranks * each

    def count(self, parameter: Parameter) -> int:
        """Rows of a parameter: outputs of a linear module, experts, entries of a table, or the length of a vector."""
        name, numel = parameter.name, parameter.numel
        features = self._linear.get(name)
        if features is not None and numel == features[0] * features[1]:
            return features[1]
        if parameter.component.endswith(".experts") and parameter.active < numel:
            return self._experts.get(name.rpartition(".")[0], 1)
        bias = self._numel.get(f"{name.removesuffix('.weight')}.bias")
        if name.endswith(".weight") and bias is not None:  # a norm, or a convolution
            return bias
        tower = parameter.component.partition(".")[0]
        width = self._widths.get(tower if tower != "language" else "", 0) or self._widths[""]
        if not width or numel % width:
            return numel
        if name in self._convolutions:
            return width
        # what is larger than any vector is a table: embeddings of tokens or of positions; a router has a row per expert
        is_table = numel > self._widest or parameter.component.endswith(".router")
        return numel // width if is_table else numel

    def _numbers_of_experts(self, cost_model: CostModel) -> dict[str, int]:
        """Number of experts by the module that holds them, from the router beside it: a row for each expert."""
        width = self._widths[""]
        largest: dict[str, int] = {}
        for parameter in cost_model.parameters:
            if parameter.component.endswith(".router") and parameter.numel >= width:
                beside = parameter.name
                while beside:
                    beside = beside.rpartition(".")[0]
                    largest[beside] = max(largest.get(beside, 0), parameter.numel)
        holders = {p.name.rpartition(".")[0] for p in cost_model.parameters if p.component.endswith(".experts")}
        found = ((holder, largest.get(holder.rpartition(".")[0], 0)) for holder in holders)
        return {holder: numel // width for holder, numel in found if width and numel}


@remembered
def rows_of(cost_model: CostModel) -> Rows:
    """Rows of a model's parameters, found once."""
    return Rows(cost_model)
