"""`headway init`: look at a model and data, and write a configuration that trains the one on the other."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.index import build_indices
from headway.cli.options import ChatTemplateOption, ColumnOption, JsonOption, column_names, devices_from
from headway.cli.output import needs_extra, print_result, warn
from headway.cli.resolve import resolve_ledger
from headway.errors import UsageError
from headway.files import is_taken, write_output
from headway.log.working import working
from headway.report import format_bytes, format_count, render_pairs
from headway.stores import shown, url_of

if TYPE_CHECKING:
    from headway.config.model import ModelConfig
    from headway.data.processor_settings import ProcessorSettings

ModelOption = Annotated[
    str, typer.Option("--model", metavar="M", help="Model to train: a model folder, config.json or Hub id.")
]
DataOption = Annotated[
    list[str],
    typer.Option("--data", metavar="D", help=("File, folder, glob or URL of samples. Repeatable for a mixture.")),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Device whose memory the run must fit, as `headway devices` names it: H100, 4090.",
        autocompletion=devices_from,
    ),
]
EvalOption = Annotated[
    str | None,
    typer.Option(
        "--eval",
        metavar="D",
        help="File, folder, glob or URL of held-out samples, which the run answers after its last step.",
    ),
]
OutputOption = Annotated[
    Path, typer.Option("-o", "--output", metavar="FILE", help="YAML file to write. The file must not exist yet.")
]


def init(
    model: ModelOption,
    data: DataOption,
    held_out: EvalOption = None,
    device: DeviceOption = None,
    output: OutputOption = Path("train.yaml"),
    column: ColumnOption = None,
    chat_template: ChatTemplateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a commented YAML file that trains a model on your data.

    Headway measures lengths as `headway index` does, and plans packs and memory as `headway train --dry-run` does. With
    --device, Headway chooses settings that fit the device: if needed, recomputation, 8-bit optimizer states or LoRA.

    Example: headway init --model Qwen/Qwen3-VL-2B-Instruct --data chats.jsonl --device 4090 -o train.yaml
    """
    if is_taken(output):
        raise UsageError(
            f"{shown(output)} exists already, and is left as it is. Name another file with -o, or delete it."
        )
    if url_of(output) is None and not output.parent.is_dir():
        raise UsageError(f"-o {output}: the folder {output.parent} does not exist. Make it, or name another.")
    from headway.devices import named_device

    # Inputs first: a typo is told before the processor is opened, which takes seconds.
    target = named_device(device) if device is not None else None
    with needs_extra("looking at data"):
        from headway.data.sources import open_source
        from headway.hub import located

        columns = column_names(column)
        sources = [open_source(path, columns=columns) for path in data]
        if held_out is not None:
            open_source(held_out, columns=columns)
        path = located(model)
    from headway.data.chat_settings import ChatSettings
    from headway.data.processor_settings import ProcessorSettings

    # Lengths of the data by the model's own tokenizer and processor.
    processing = ProcessorSettings(ChatSettings.of(chat_template))
    indices = build_indices(sources, path, {}, settings=processing)
    from headway.config.model import ModelConfig

    learns = ModelConfig(path=path)
    # Rows with tokens that the model has no embedding for: the recipe gives them rows, and they are measured again.
    if any(index.bad for index in indices) and (added := _added_tokens(path, processing)):
        learns = ModelConfig.model_validate({"path": path, **added})
        processing = _with_tokens(processing, learns)
        indices = build_indices(sources, path, {}, settings=processing)
    from headway.predict.suggest import suggest

    with working("planning a run"):
        suggestion = suggest(
            model,
            dict(zip(data, indices, strict=True)),
            resolve_ledger(learns),
            device=target,
            run_folder=f"runs/{output.stem}",
            columns=columns,
            held_out=held_out,
            chat_template=chat_template,
            new_tokens={"new_tokens": learns.new_tokens, "new_special_tokens": learns.new_special_tokens},
            has_weights=not Path(path).exists() or any(Path(path).glob("*.safetensors")),
        )
    # Write the recipe first: what is printed below describes a file that exists.
    write_output(output, suggestion.text, option="-o", new=True)
    if suggestion.lengths.bad:
        warn(
            f"{suggestion.lengths.bad} rows cannot be used, and training will stop at the first of them. `headway "
            "index` names these rows. To train without them, set data.bad: {policy: skip}."
        )
    settings, lengths, planned = suggestion.config, suggestion.lengths, suggestion.planned
    record = {
        "file": shown(output),
        "samples": len(lengths.tokens),
        "bad": lengths.bad,
        "median": lengths.median,
        "p95": lengths.p95,
        "longest": lengths.longest,
        "tokens_per_pack": settings.data.tokens_per_pack,
        "steps_per_epoch": suggestion.steps_per_epoch,
        "epochs": suggestion.epochs,
        "peak_bytes": None if planned is None else planned.memory.peak,
        "lora": settings.model.lora is not None,
    }
    memory = "not checked. Add --device NAME, such as --device 4090"
    if planned is not None and planned.device is not None:
        memory = f"{format_bytes(planned.memory.peak)} by the plan, on {planned.device.title}"
        memory += f", with LoRA of rank {settings.model.lora.rank}" if settings.model.lora is not None else ""
    pairs = [
        ("wrote", shown(output)),
        ("lengths", str(lengths)),
        ("packs", f"{format_count(settings.data.tokens_per_pack)} tokens each"),
        ("epochs", f"{suggestion.epochs}, each of {format_count(suggestion.steps_per_epoch)} steps on one device"),
        ("memory", memory),
        ("next", f"headway train {shown(output)}"),
    ]
    print_result(lambda: record, lambda: render_pairs(pairs), as_json=as_json)


def _added_tokens(path: str, processing: "ProcessorSettings") -> dict[str, list[str]]:
    """Tokens that the tokenizer has and the model has no row for, by the setting that gives it one."""
    from headway.data.encoders import open_encoder

    tokeniser = open_encoder(path, settings=processing).tokeniser
    special = {str(added) for added in tokeniser.tokenizer.added_tokens_decoder.values() if added.special}
    settings: dict[str, list[str]] = {}
    for token in tokeniser.missing_tokens:
        settings.setdefault("new_special_tokens" if token in special else "new_tokens", []).append(token)
    return settings


def _with_tokens(processing: "ProcessorSettings", learns: "ModelConfig") -> "ProcessorSettings":
    from headway.data.new_tokens import NewTokens

    return replace(processing, tokens=NewTokens(learns.new_tokens, learns.new_special_tokens))
