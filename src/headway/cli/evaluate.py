"""`headway evaluate`: loss, perplexity and exact match of a saved model on held-out samples, as in training."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli import opened
from headway.cli.options import ChatTemplateOption, JsonOption, spread
from headway.cli.output import needs_extra, print_result
from headway.errors import DataError, UsageError
from headway.log.working import working
from headway.report import Column, format_count, format_share, render_pairs, render_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headway.answer.answers import Answer
    from headway.answer.evaluate import Evaluation
    from headway.answer.model_folder import OpenedModel
    from headway.config import TrainConfig
    from headway.data import Budget, Encoder, Sample

_ROOMY = 8192  # tokens of a pack where nothing says how many; more if a sample is longer


@spread(without=["dtype"])
def evaluate(
    model: opened.ModelArgument,
    data: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DATA]...", help="Files, folders, globs or URLs of datasets. Default: the run's data.eval."
        ),
    ] = None,
    packing_length: Annotated[
        int | None,
        typer.Option(metavar="L", min=1, help="Token budget of a pack [tokens]. Default: the run's budget, or 8192."),
    ] = None,
    max_samples: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Evaluate only the first samples of each dataset [samples].")
    ] = None,
    generate: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help=("Write out the answers to this number of chats of each dataset [samples].")
        ),
    ] = None,
    max_new_tokens: opened.MaxNewTokensOption = 64,
    chat_template: ChatTemplateOption = None,
    *,
    opening: opened.OpenOptions,
    as_json: JsonOption = False,
) -> None:
    """Score a model on held-out samples, with the same numbers as evaluations during training.

    Loss is the mean cross-entropy over supervised tokens, and perplexity is its exponential. A sample is exact if
    greedy decoding gives all of its answers to the letter. For pairs of answers, the command prints their mean loss and
    the share of pairs in the right order, by the loss and reference of the run. With torchrun, the processes share the
    packs.

    Example: headway evaluate runs/mine held_out.jsonl
    """
    with needs_extra("evaluating"):
        from headway.data.sources import open_source

        for path in data or ():
            open_source(path)  # a typo is told before torch is imported
        from headway.answer.answers import GenerationEval
        from headway.answer.evaluate import EvalSet, Evaluation, JudgedModel, eval_collator, judge_for
        from headway.answer.model_folder import find_model, make_encoder, open_model
        from headway.config import RunConfig, load_config
        from headway.config.model import SpeedConfig
        from headway.data.chat_settings import ChatSettings
        from headway.log.run_files import CONFIG
        from headway.models.head import model_with_loss
        from headway.models.parallel.ranks import join_ranks
        from headway.models.vision import vision_geometry

    chats = ChatSettings.of(chat_template)
    location = find_model(model, opening.base, best=opening.best, average=opening.ema)
    config = load_config(location.run / CONFIG) if location.run is not None else None
    samples = _samples(data, config, max_samples)  # a typo is told before a model is read
    where, precision = opened.chosen_device(RunConfig(folder=Path(), device=opening.device))
    if config is not None and (config.run.dtype == "float32") == (where.type == "cpu"):  # the run's dtype, if possible
        where, precision = opened.chosen_device(RunConfig(folder=Path(), device=opening.device, dtype=config.run.dtype))
    ranks = join_ranks(where)
    with working(f"opening {model}"):
        loaded = open_model(location, dtype=precision.params, device=where, for_generation=False, chats=chats)
    chunk = config.speed.loss_chunk if config is not None else SpeedConfig().loss_chunk
    with_loss = model_with_loss(loaded.model, chunk=chunk)
    limits = {} if config is None else config.data.limits
    encoder = make_encoder(loaded.processor, loaded.model, **limits)
    budget = _budget(packing_length, config, encoder, samples)
    geometry = vision_geometry(loaded.model)

    results: dict[str, Evaluation] = {}
    answers: dict[str, list[Answer]] = {}
    with working("encoding samples, and computing what answers are compared with"):
        every_row = [row for rows in samples.values() for row in rows]
        judge = judge_for(every_row, config, JudgedModel(with_loss, where, precision, ranks))
        held_out = {
            path: EvalSet(rows, encoder, budget, ranks, geometry, judge=judge) for path, rows in samples.items()
        }
        judge.prepare([batch for part in held_out.values() for batch in part.packs])
    for path, rows in samples.items():
        with working(f"evaluating {len(rows):,} samples of {path}"):
            results[path] = held_out.pop(path).evaluate(with_loss, where, precision.autocast)
        if generate is not None:
            collator = eval_collator(encoder, geometry, ranks)
            asked_for: dict[str, Any] = {"count": generate, "max_new_tokens": max_new_tokens}
            with working(f"answering {generate:,} samples of {path}"):
                questions = GenerationEval(rows, encoder, budget, collator, ranks, **asked_for)
            answers[path] = questions.answer(loaded.model, where, precision.autocast)
    if not ranks.is_first:
        return
    total = Evaluation.total(list(results.values()))
    sources = [{"data": path, **_record(result), **_answers(answers.get(path))} for path, result in results.items()]
    print_result(
        lambda: {
            "model": location.path,
            "kind": location.kind,
            **({"average": True} if loaded.is_average else {}),
            **_record(total),
            **({"judged_by": dict(judge.facts)} if judge.facts else {}),
            "sources": sources,
        },
        lambda: _text(loaded, budget, results, total, answers, judge.note),
        as_json=as_json,
    )


def _samples(data: "Sequence[str] | None", config: "TrainConfig | None", most: int | None) -> "dict[str, list[Sample]]":
    from headway.data import read_samples
    from headway.data.sources.opening import samples_of
    from headway.train.data import open_dataset

    if data:
        return {path: read_samples(path)[:most] for path in dict.fromkeys(data)}
    if config is not None and config.data.eval is not None:
        held_out = config.data.eval
        return {str(held_out.path): list(samples_of(open_dataset(held_out)))[:most]}
    raise UsageError(
        "There is nothing to evaluate on, because this model has no data.eval. Give DATA, such as held_out.jsonl."
    )


def _budget(
    packing_length: int | None, config: "TrainConfig | None", encoder: "Encoder", samples: "dict[str, list[Sample]]"
) -> "Budget":
    """Budget of a pack: as asked for, as in the run, or enough for every sample."""
    from headway.data import Budget
    from headway.train.data import budget_of

    for path, rows in samples.items():
        if not rows:
            raise DataError(f"{path} holds no sample, so there is nothing to evaluate.")
    if packing_length is not None:
        return Budget(packing_length)
    if config is not None:
        return budget_of(config.data)
    longest = max(encoder.measure(sample).tokens for rows in samples.values() for sample in rows)
    return Budget(max(_ROOMY, longest))


def _record(result: "Evaluation") -> dict[str, Any]:
    if result.pairs:
        return {**result.to_dict(), "tokens": result.tokens}
    return {**result.to_dict(), "perplexity": result.perplexity, "tokens": result.tokens}


def _answers(answers: "Sequence[Answer] | None") -> dict[str, Any]:
    if answers is None:
        return {}
    shown = [
        {"where": a.where, "prompt": a.prompt, "gold": a.gold, "answer": a.answer, "exact": a.is_exact} for a in answers
    ]
    return {"answers": shown}


def _text(
    loaded: "OpenedModel",
    budget: "Budget",
    results: "dict[str, Evaluation]",
    total: "Evaluation",
    answers: "dict[str, list[Answer]]",
    judged: str,
) -> str:
    from headway.answer.answers import answer_line

    names = ("margin", "pairs right") if total.pairs else ("perplexity", "exact match")
    columns = [Column("data", "left"), *(Column(name) for name in ("samples", "tokens", "loss", *names))]
    rows = [_row(name, result) for name, result in results.items()]
    footer = _row("all", total) if len(rows) > 1 else None
    pairs = [("model", loaded.location.path), *([("weights", "their moving average")] if loaded.is_average else [])]
    pairs += [("pack", f"at most {format_count(budget.tokens)} tokens")]
    pairs += [("judged by", judged)] if judged else []
    parts = [render_pairs(pairs), render_table(columns, rows, footer=footer)]
    parts += ["\n".join(answer_line(answer, longest=400) for answer in of_source) for of_source in answers.values()]
    return "\n\n".join(parts)


def _row(name: str, result: "Evaluation") -> list[str]:
    counts = [format_count(result.samples), format_count(result.tokens)]
    if result.pairs:
        right = f"{format_share(result.accuracy)} ({format_count(result.right)} of {format_count(result.pairs)})"
        return [name, *counts, f"{result.loss:.4f}", f"{result.margin:.4f}", right]
    exact = f"{format_share(result.exact_match)} ({format_count(result.exact)})" if result.answers else "-"
    return [name, *counts, f"{result.loss:.4f}", f"{result.perplexity:.4g}", exact]
