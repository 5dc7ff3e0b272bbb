"""`headway export`: a checkpoint as a model folder that other tools open."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli.opened import BestOption, EmaOption
from headway.cli.options import JsonOption
from headway.cli.output import needs_extra, print_result
from headway.errors import UsageError
from headway.log.working import working
from headway.report import presentable
from headway.stores import fetch, shown

if TYPE_CHECKING:
    from headway.checkpoint.push import HubRepo


class Dtype(StrEnum):
    """Dtypes of exported weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


SourceArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_OR_CHECKPOINT",
        help=("Run folder, which stands for its newest checkpoint, or one folder of its checkpoints/."),
    ),
]
FolderArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[FOLDER]",
        help=(
            "Folder of the model. The folder must not exist. Leave FOLDER out if --push-to-hub sends a folder that "
            "was exported before."
        ),
    ),
]
DtypeOption = Annotated[Dtype | None, typer.Option(help="Dtype of the weights. Default: the dtype of training.")]
MergeOption = Annotated[
    bool,
    typer.Option(
        "--merge-lora", help=("Add low-rank adapters into the weights, instead of writing a folder of adapters.")
    ),
]
PushOption = Annotated[
    str | None,
    typer.Option(
        metavar="OWNER/NAME",
        help="Send the folder to the Hugging Face Hub too, with the token that `hf` uses (HF_TOKEN).",
    ),
]
PrivateOption = Annotated[
    bool,
    typer.Option(
        "--private", help=("With --push-to-hub: make a private repository. Default: as the owner's settings say.")
    ),
]
UpdateOption = Annotated[
    bool, typer.Option("--update", help="With --push-to-hub: add a commit to a repository that exists.")
]


def export(
    source: SourceArgument,
    folder: FolderArgument = None,
    dtype: DtypeOption = None,
    ema: EmaOption = None,
    merge_lora: MergeOption = False,
    best: BestOption = False,
    push_to_hub: PushOption = None,
    private: PrivateOption = False,
    update: UpdateOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a Hugging Face folder of a checkpoint: weights, config, generation config, processor and a model card.

    Any number of processes may have written the checkpoint. One process reads the checkpoint layer by layer, so memory
    for one weight file (5 GB) and one layer is enough. Headway checks every file of the checkpoint first.

    Example: headway export runs/mine model/ --push-to-hub me/mine --private
    """
    if push_to_hub is None and (private or update):
        option = "--private" if private else "--update"
        raise UsageError(f"{option} needs --push-to-hub OWNER/NAME. Give that option too, or leave this one out.")
    if folder is None:
        options = {"--dtype": dtype is not None, "--ema": ema is not None, "--merge-lora": merge_lora, "--best": best}
        _push_alone(source, push_to_hub, [name for name, is_set in options.items() if is_set], private, update, as_json)
        return
    with needs_extra("exporting"):
        import torch

        from headway.checkpoint.card import FILE_NAME as CARD
        from headway.checkpoint.export import export as write
        from headway.checkpoint.export import find_checkpoint_in
        from headway.models.load import processor_note

    repo = None if push_to_hub is None else _repo(push_to_hub, private, update)
    checkpoint = find_checkpoint_in(source, best=best)
    if repo is not None and not merge_lora:
        from headway.checkpoint.push import refuse_local_base

        refuse_local_base(checkpoint.model_folder)
    chosen = None if dtype is None else getattr(torch, dtype.value)
    with working(f"writing the model after step {checkpoint.step:,}"):
        is_average = write(checkpoint, folder, dtype=chosen, average=ema, merge_adapters=merge_lora)
    # The export is adapters alone, unless they are merged; it has a card if the run left records.
    here = fetch(folder, lambda name: repo is not None or not name.endswith(".safetensors"))
    what = "the adapters" if (here / "adapter_config.json").is_file() else "the model"
    has_card = (here / CARD).is_file()
    weights = ", the moving average of the weights" if is_average else ""
    lines = [
        f"{shown(folder)}: {what} after step {checkpoint.step}{weights}",
        f"model card: {shown(folder / CARD) if has_card else 'none, as no records of its run can be read'}",
    ]
    if (note := processor_note(here)) is not None:
        lines.append(f"processor: {note}")
    url = None
    if repo is not None:
        url = _pushed(here, repo, private=private, message=f"Headway: {what} after step {checkpoint.step}")
        lines += [f"on the Hub: {url}", *_sent_lines(here)]
    print_result(
        lambda: {
            "folder": shown(folder),
            "step": checkpoint.step,
            **({"average": True} if is_average else {}),
            **({} if url is None else {"url": url}),
        },
        lambda: presentable("\n".join(lines)),
        as_json=as_json,
    )


def _push_alone(source: Path, name: str | None, options: list[str], private: bool, update: bool, as_json: bool) -> None:
    """Send a folder that was exported before.

    Raises:
        UsageError: there is nowhere to send it, the source is none, or options that change an export are given.
    """
    if name is None:
        raise UsageError("FOLDER is missing. Say where the model goes, such as headway export runs/mine model/.")
    if not any((source / file).is_file() for file in ("config.json", "adapter_config.json")):
        raise UsageError(
            f"{source} is no model folder, so FOLDER is missing. Say where its model goes before Headway sends it, "
            f"such as headway export {source} model/ --push-to-hub {name}."
        )
    if options:
        raise UsageError(
            f"{options[0]} cannot take effect, because {source} is exported already and is sent unchanged."
        )
    with needs_extra("sending to the Hub"):
        from headway.checkpoint.push import files_to_send, refuse_local_base

    files_to_send(source)  # a link is told before the Hub is asked
    repo = _repo(name, private, update)
    refuse_local_base(source)
    url = _pushed(source, repo, private=private, message="Headway: a model folder")
    print_result(
        lambda: {"folder": str(source), "url": url},
        lambda: presentable("\n".join([f"on the Hub: {url}", *_sent_lines(source)])),
        as_json=as_json,
    )


def _repo(name: str, private: bool, update: bool) -> "HubRepo":
    with needs_extra("sending to the Hub"):
        from headway.checkpoint.push import find_repo

    with working("asking the Hub"):
        return find_repo(name, private=private, update=update)


def _sent_lines(folder: Path) -> list[str]:
    """The files that were sent, and what lies beside them and was not."""
    from headway.checkpoint.push import files_to_send

    sent, others = files_to_send(folder)
    shortened = ", ".join(others[:10]) + (f" and {len(others) - 10:,} more" if len(others) > 10 else "")
    return [f"sent: {', '.join(sent)}", *([f"not sent: {shortened}"] if others else [])]


def _pushed(folder: Path, repo: "HubRepo", *, private: bool, message: str) -> str:
    """Send a folder, with the client's own bars on a terminal; the page of its repository."""
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # documented, not declared

    from headway.checkpoint.push import push

    if not sys.stderr.isatty():
        disable_progress_bars()
    return push(folder, repo, private=private, message=message)
