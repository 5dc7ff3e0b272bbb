"""`headway train --dry-run`: what a run will need, from its recipe alone."""

import math
import os
import sys
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.index import build_indices
from headway.cli.output import needs_extra, print_result, warn
from headway.cli.resolve import resolve_config, resolve_ledger
from headway.errors import DataError, HeadwayError, PlanError, UsageError
from headway.log.working import working
from headway.report import (
    Column,
    format_bytes,
    format_count,
    format_flops,
    format_share,
    render_lines,
    render_pairs,
    render_table,
)
from headway.report.terminal import coloured

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headway.config import TrainConfig
    from headway.config.model import ModelConfig
    from headway.count import CostModel
    from headway.count.activations import SavedActivations, SavedByPrecision
    from headway.data.index import LengthIndex
    from headway.devices import Device
    from headway.packing.lengths import LengthTable
    from headway.predict.collectives import Links
    from headway.predict.dry_run import DryRun, Packs
    from headway.predict.fitting import Way
    from headway.predict.measured_data import MeasuredData


_NO_ROOM = "DOES NOT FIT"
LABELS = {"base": "weights, base", "casts": "weights, cast", "gathered": "weights, gathered",
    "reducing": "gradients, summing", "passing": "gradients, passing", "head": "logits and loss",
    "updating": "optimizer, working"}  # fmt: skip


def print_dry_run(config: "TrainConfig", *, devices: int | None, device: str | None, as_json: bool) -> None:
    """Plan the run that a configuration describes, and print it.

    Args:
        config: the recipe.
        devices: processes, a device each; the recipe's own number when None.
        device: name of the device; the recipe's own when None.
        as_json: one JSON object instead of tables.

    Raises:
        HeadwayError: an unknown model or device, a mesh that does not fit, or a setting that cannot take effect.
        typer.Exit: the run does not fit the device; exit code 1.
    """
    from headway.devices import named_device
    from headway.predict.dry_run import dry_run, with_copies

    count = devices or config.plan.devices or 1
    name = device or config.plan.device
    config = with_copies(config, count)
    cost_model = resolve_ledger(config.model)
    target = named_device(name) if name is not None else None
    if target is None:
        config = of_this_machine(config)
    lengths = lengths_of_data(config, cost_model, strict=True)
    planned = dry_run(config, cost_model, saved_of_recipe(config), devices=count, device=target, lengths=lengths)
    print_result(planned.to_dict, lambda: in_red(_text(config, planned)), as_json=as_json)
    if planned.fits is False:
        raise typer.Exit(1)


def in_red(text: str) -> str:
    """Colour what says that memory does not suffice, where stdout is a terminal."""
    return text.replace(_NO_ROOM, coloured(_NO_ROOM, "red", sys.stdout))


def of_this_machine(config: "TrainConfig") -> "TrainConfig":
    """Name the processor in a recipe that takes what there is, where PyTorch sees no accelerator on this machine."""
    if config.run.device != "auto" or find_spec("torch") is None:
        return config
    from headway.cli.devices import local_device

    if local_device(None).type != "cpu":
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"device": "cpu"})})


def saved_of_recipe(config: "TrainConfig") -> "SavedByPrecision":
    """Activations that autograd saves of a recipe's model, with its frozen parts and adapters, by precision."""
    from headway.count.activations import SavedByPrecision

    return SavedByPrecision(partial(saved_as_learning, config.model))


def saved_as_learning(model: "ModelConfig", precision: str) -> "SavedActivations":
    """Read what ships of a model that learns whole; trace one that is partly frozen or adapted, if torch is there."""
    if model.freeze or model.lora or model.has_own_shape:
        try:
            from headway.predict.saved_activations import saved_of_partly_trained
        except ModuleNotFoundError:  # the shipped figures are those of a model that learns whole, which saves more
            return saved_activations(model.path, precision)
        return saved_of_partly_trained(resolve_config(model.path), model, precision)
    return saved_activations(model.path, precision)


def saved_activations(name: str, precision: str) -> "SavedActivations":
    """Load the activations that autograd saves of a shipped model, or trace them."""
    from headway.count.activations import shipped_activations
    from headway.count.models import shipped_name

    shipped = shipped_name(name)
    if shipped is not None:
        return shipped_activations(shipped, precision)
    with (
        needs_extra(f"{name!r} is not a shipped model, so its own code must be traced, and that"),
        working(f"tracing what autograd saves of {name}"),
    ):
        from headway.tracing.block_activations import saved_of_config

        return saved_of_config(resolve_config(name), precision)


def _text(config: "TrainConfig", planned: "DryRun") -> str:
    shape, params, packs = planned.shape, planned.params, planned.packs
    pairs = [
        ("model", f"{config.model.path}  (ledger of {planned.model})"),
        ("parameters", f"{params.total:,}, {params.trainable:,} of them trained; a token uses {params.active:,}"),
        (
            "devices",
            f"{shape.world_size:,} = {shape.replicate} replicas x {shape.shard} shards x {shape.sequence} that share "
            f"each pack" + (f"; experts over {shape.expert}" if shape.expert > 1 else ""),
        ),
    ]
    sections = [render_pairs(pairs), _memory_table(planned, _residual(config, planned))]
    if planned.ways:
        sections.append(ways_text(planned.device, planned.ways))
    if packs is not None:
        sections += [_flops_table(planned, packs), _packs_pairs(config, planned, packs)]
    notes = [*planned.notes, _left_out(config, planned)]
    return "\n\n".join([*sections, render_lines(notes)])


def _residual(config: "TrainConfig", planned: "DryRun") -> dict[str, Any] | None:
    """Memory that the run of this recipe's folder held beyond its prediction, on this device and with this torch."""
    if planned.device is None or not (config.run.folder / "memory.json").is_file():  # torch is imported below
        return None
    with needs_extra("reading what a run held"):
        from headway.train.memory_record import last_residual

        return last_residual(config.run.folder, planned.device.names)


def _memory_table(planned: "DryRun", residual: dict[str, Any] | None = None) -> str:
    from headway.predict.moments import PARTS

    memory = planned.memory
    fullest = memory.fullest
    rows = [[LABELS.get(part, part), format_bytes(size), PARTS[part]] for part, size in fullest.parts.items()]
    footer = [f"most, in {_in_words(fullest.name)}", format_bytes(memory.peak), verdict(planned)]
    columns = [Column("memory of each device", "left"), Column("size"), Column("what", "left")]
    moments = ", ".join(f"{moment.name} {format_bytes(moment.total)}" for moment in memory.moments)
    lines = [render_table(columns, rows, footer=footer), f"by moment: {moments}"]
    if residual is not None:
        sign = "+" if residual["more"] >= 0 else "-"
        lines.append(
            f"last measured {sign}{format_bytes(abs(residual['more']))} on this device, of "
            f"{format_bytes(residual['predicted'])} predicted then, with torch {residual['torch']}"
        )
    if memory.host:
        lines.append(f"in the host's memory: {format_bytes(memory.host)}")
    return "\n".join(lines)


def _in_words(moment: str) -> str:
    return "a model just built" if moment == "built" else f"the {moment}" if " " in moment else moment


def _left_out(config: "TrainConfig", planned: "DryRun") -> str:
    from headway.predict.memory import allowances

    shape = planned.shape
    groups = sum(size > 1 for size in (shape.fsdp, shape.replicate, shape.sequence, shape.expert))
    if planned.device is None and config.run.device == "cpu":
        return "Planned for this machine's processor; --device NAME plans for another."
    sizes = allowances(groups)
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
    total = format_bytes(sum(sizes.values()))
    return f"Not in the sizes above, and allowed for on a CUDA device: {parts}; {total} in all."


def verdict(planned: "DryRun") -> str:
    """Say whether a run fits its device, and by what share of its memory."""
    from headway.predict.dry_run import USABLE

    device = planned.device
    if device is None or device.memory_bytes is None:
        return "name a device with --device to see whether it fits"
    share = format_share(planned.memory.peak / device.memory_bytes)
    text = f"{share} of {device.title}'s {format_bytes(device.memory_bytes)}"
    return text if planned.fits else f"{text}: {_NO_ROOM} within {format_share(USABLE)}"


def ways_text(device: "Device | None", ways: "Sequence[Way]") -> str:
    """Say which settings, or how many devices, make a run fit a device, as `--set` takes them."""
    from headway.predict.dry_run import USABLE

    assert device is not None
    assert device.memory_bytes is not None
    room = int(USABLE * device.memory_bytes)
    if ways[0].peak_bytes > room:
        adapters = "" if any("model.lora" in setting for setting in ways[0].settings) else "adapters (model.lora), "
        return render_lines(
            [
                f"No settings make it fit {format_bytes(room)}. The least that was found is {ways[0]}, which takes "
                f"{format_bytes(ways[0].peak_bytes)}; train {adapters}a smaller model, or on more devices."
            ]
        )
    columns = [Column("what fits, by the plan (--set)", "left"), Column("size"), Column("price", "left")]
    return render_table(columns, [[str(way), format_bytes(way.peak_bytes), way.price] for way in ways])


def _flops_table(planned: "DryRun", packs: "Packs") -> str:
    by_name: dict[str, list[int]] = {}
    for row in packs.flops.rows:
        sums = by_name.setdefault(row.name, [0, 0])
        sums[0] += row.total
        sums[1] += row.recompute
    assert planned.flops is not None
    total = planned.flops.total
    if total > packs.flops.total:
        by_name["reference, forward without adapters"] = [total - packs.flops.total, 0]
    rows: list[list[Any]] = [
        [name, format_flops(useful), format_share(useful / total), format_flops(again) if again else "-"]
        for name, (useful, again) in sorted(by_name.items(), key=lambda item: -item[1][0])
    ]
    footer = ["step of all devices", format_flops(total), format_share(1.0)]
    footer.append(format_flops(packs.flops.recompute) if packs.flops.recompute else "-")
    columns = [Column("useful FLOPs", "left"), Column("of a step"), Column("share"), Column("computed again")]
    return render_table(columns, rows, footer=footer)


def _packs_pairs(config: "TrainConfig", planned: "DryRun", packs: "Packs") -> str:
    report, counts = packs.report, packs.counts
    ranks = planned.shape.world_size // planned.shape.sequence
    step = ranks * config.optim.accumulation
    tokens = report.fill * config.data.tokens_per_pack * step
    left = [f"{n:,} {what}" for what in ("dropped", "truncated", "split") if (n := getattr(counts, what))]
    pairs = [
        ("lengths", packs.lengths),
        ("pack", f"{config.data.tokens_per_pack:,} tokens, {packs.samples_per_pack:.1f} samples on average"),
        ("step", f"{step:,} packs, {format_count(math.floor(tokens))} tokens, {format_flops(report.step_flops)}"),
        ("fill", f"{report.fill:.4f} of the packs' tokens, by {report.strategy!r}"),
        (
            "balance",
            f"{report.balance:.4f}: mean over heaviest FLOPs of the {ranks:,} ranks that have packs of their own",
        ),
    ]
    if packs.reference is not None and planned.refers == "once":
        flops = format_flops(packs.reference.total)
        pairs.append(("reference", f"stored: a forward of the data before the first step, {flops} for a step's packs"))
    if packs.most_patches:
        pairs.append(("patches", f"at most {packs.most_patches:,} in a pack"))
    if left:
        pairs.append(("over-long", f"{', '.join(left)} of {counts.read:,} samples"))
    return render_pairs(pairs)


def measured_data(data: list[str], config: "TrainConfig", cost_model: "CostModel") -> "MeasuredData":
    """Index datasets, or read their indices, and time how fast their samples are made.

    A dataset of the recipe is read with its settings there: its columns, bounds on media and policy for long samples.

    Args:
        data: files, folders, globs or URLs.
        config: of the run, whose model's processor measures.
        cost_model: of its model.

    Raises:
        HeadwayError: no such model or data, or no row that can be used.
    """
    with needs_extra("indexing"):
        from headway.data.processor_settings import ProcessorSettings
        from headway.data.sources import open_source
        from headway.data.sources.opening import own_names
        from headway.train.data import named_parts, open_dataset

    data = list(dict.fromkeys(data))
    settings = ProcessorSettings.of(**config.of_processor())
    # A dataset that the recipe names is read with the recipe's columns and policy, others with the defaults.
    recipe = {_place(part.path or ""): (name, part) for name, part in named_parts(config.data)}
    own = [recipe.get(_place(path), (None, None)) for path in data]
    names = own_names(data, [name for name, _ in own])
    sources = [
        open_source(path, name=name) if part is None else open_dataset(part, name)
        for path, name, (_, part) in zip(data, names, own, strict=True)
    ]
    overlong = {
        name: (None if part is None else part.overlong) or config.data.overlong
        for name, (_, part) in zip(names, own, strict=True)
    }
    indices = build_indices(sources, config.model.path, config.data.max_characters, settings=settings)
    indices = _with_prompts(indices, config, cost_model)
    with needs_extra("encoding samples"):
        from headway.data.encoders import open_encoder
        from headway.hub import located
        from headway.predict.measured_data import MeasuredData, joined, making_s

    lengths = joined(dict(zip(names, indices, strict=True)), overlong)
    # Lengths decide packs and memory; the time of making packs comes from encoding a few rows.
    encoder = open_encoder(located(config.model.path), max_characters=config.data.max_characters, settings=settings)
    return MeasuredData(", ".join(source.name for source in sources), lengths, making_s(sources, indices, encoder))


def _with_prompts(indices: "list[LengthIndex]", config: "TrainConfig", cost_model: "CostModel") -> "list[LengthIndex]":
    """The lengths of rows with several answers as packs hold them: a prompt once where the run and the model do so."""
    section = config.objective_section
    if section is None or not section.shares_prompts or cost_model.mixed_otherwise:
        return indices
    return [index.with_prompts_once() for index in indices]


def lengths_of_data(
    config: "TrainConfig", cost_model: "CostModel", *, strict: bool = False
) -> "tuple[str, LengthTable] | None":
    """Name and lengths of a recipe's own data, where its plan section names no others.

    They are measured as training measures them, and kept. Sources of a mixture count by their samples. Data that stream
    or lie behind a URL are not read for a plan.

    Args:
        config: the recipe.
        cost_model: of its model.
        strict: raise what training would refuse of the data, of which a command with other lengths warns.

    Returns:
        None where the recipe names other lengths or nothing here measures the data, which is warned of.

    Raises:
        DataError: the data are missing, or have no row that can be used, and `strict` is set.
    """
    planned = config.plan
    if planned.mix or planned.lengths is not None:
        return None
    try:
        with needs_extra("measuring data.train"):
            from headway.data.processor_settings import ProcessorSettings
            from headway.predict.measured_data import joined
            from headway.train.data import open_stages, overlong_of

            find_data(config)
        if config.data.stream is not None:
            return None
        if any("://" in (part.path or "") for stage in config.data.played for part in stage.parts):
            raise PlanError("they lie behind a URL.")
        sources, _ = open_stages(config.data)
        settings = ProcessorSettings.of(**config.of_processor())
        names = [source.name for source in sources]
        indices = build_indices(sources, config.model.path, config.data.max_characters, settings=settings)
        indices = _with_prompts(indices, config, cost_model)
        lengths = joined(dict(zip(names, indices, strict=True)), overlong_of(config.data))
    except HeadwayError as error:
        if strict and isinstance(error, DataError):
            raise
        warn(f"The lengths of data.train are not measured, so that no packs are planned from them: {error}")
        return None
    return f"data.train: {', '.join(names)}", lengths


def find_data(config: "TrainConfig") -> None:
    """Look for the data of a recipe that lie on this machine; a store is asked when it is opened.

    Raises:
        DataError: a path names nothing.
    """
    from headway.data.sources.files import find_files

    for part in (*(part for stage in config.data.played for part in stage.parts), config.data.eval):
        if part is not None and part.path is not None and "://" not in part.path:
            find_files(part.path)


def _place(path: str) -> str:
    """A path or URL, in one form however it is written."""
    return path if "://" in path else os.path.realpath(path)


@dataclass(frozen=True)
class LinkOptions:
    """Options that say how devices are joined [GB/s], in place of the table of devices."""

    link: Annotated[
        float | None,
        typer.Option(metavar="GB/S", min=0.001, help="Bandwidth of a device to the others of its node, one way."),
    ] = None
    network: Annotated[
        float | None,
        typer.Option(metavar="GB/S", min=0.001, help="A device's share of its node's network, one way."),
    ] = None
    per_node: Annotated[int | None, typer.Option(metavar="N", min=1, help="Devices of a node.")] = None

    def of(self, device: "Device | None") -> "Links | None":
        """Links of a device; None of this machine, or where nothing is known.

        Raises:
            UsageError: links are given, and no device.
        """
        from headway.predict.collectives import Links

        if device is None:
            if self._are_given:
                raise UsageError(
                    "--link, --network and --per-node join devices of a kind, and cannot take effect without --device."
                )
            return None
        link, network = (None if rate is None else rate * 1e9 for rate in (self.link, self.network))
        return Links.of_device(device, link_bytes_per_s=link, network_bytes_per_s=network, per_node=self.per_node)

    def required(self, device: "Device") -> "Links":
        """Links of a device.

        Raises:
            PlanError: too little is given, and the table does not know the rest.
        """
        links = self.of(device)
        if links is None:
            raise PlanError(
                f"how fast {device.title} is joined to others is not known. Give --link in GB/s and --per-node, with "
                "--network for more than one node, or put link_gb_per_s, devices_per_node and network_gb_per_s into "
                "your own table ($HEADWAY_PEAKS; docs/devices.md)."
            )
        return links

    def joining(self, device: "Device | None", count: int) -> "Links | None":
        """Links of so many devices; None where the table knows too little, and exchanges are taken to hide.

        Raises:
            UsageError: links are given, and no device or only one.
            PlanError: links are given, but too little of them, or they do not reach so many devices.
        """
        links = self.of(device)
        if count == 1 and self._are_given:
            raise UsageError("--link, --network and --per-node cannot take effect on one device; give --devices.")
        if self._are_given and device is not None:
            links = self.required(device)
            links.require(count)
        return links if links is not None and count > 1 and links.reaches(count) else None

    @property
    def _are_given(self) -> bool:
        return any(value is not None for value in (self.link, self.network, self.per_node))


def note_on_links(links: "Links | None", devices: int, *, on_this_machine: bool) -> str:
    """Say what a prediction takes of the exchanges between devices; nothing of one device.

    Args:
        links: that were found.
        devices: that train together.
        on_this_machine: they are processes of this machine, whose rates were measured.
    """
    if devices == 1:
        return ""
    if links is not None:
        return f"Links: {links.source}."
    if on_this_machine:
        return "Exchanges between processes of this machine are not in the step: it will take longer."
    return (
        "Exchanges between devices are taken to hide behind computing, for their links are not known: the step above "
        "is the best case. --link, --network and --per-node give them; PCI Express x16 moves 31.5 GB/s each way (4.0), "
        "or 63 (5.0)."
    )
