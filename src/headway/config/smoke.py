"""A recipe cut to a few steps, to see that all of it works before it runs for days."""

from headway.config.read import TrainConfig, changed_config

_MOST_SAMPLES = 32  # held-out ones that are judged


def smoke_of(config: TrainConfig, steps: int) -> TrainConfig:
    """The first steps of a run with everything that happens in it: warm-up, evaluation, checkpoints.

    Model, data and packs stay as they are. Warm-up takes a tenth of the steps at most, cadences come to pass at least
    once, at most 32 held-out samples are judged, records go to no tracker, and the run folder's name ends in "-smoke".

    Args:
        config: the recipe.
        steps: how many [steps].
    """
    raw = config.to_dict()
    optim, judged, run = raw["optim"], raw["eval"], raw["run"]
    optim |= {"steps": steps, "epochs": None, "warmup_steps": min(optim["warmup_steps"], max(1, steps // 10))}
    for section in (judged, raw["checkpoint"], optim["ema"]):
        if section is not None and section["every"] is not None:
            section["every"] = min(section["every"], steps)
    if config.eval.evaluates:
        judged["max_samples"] = min(judged["max_samples"] or _MOST_SAMPLES, _MOST_SAMPLES)
    judged["stop_after"] = None  # all of the steps are to be seen
    run |= {"folder": f"{config.run.folder}-smoke", "log_every": 1, "trackers": []}
    if config.run.profile is not None:
        length = min(run["profile"]["steps"], steps)
        run["profile"] |= {"start": min(run["profile"]["start"], steps - length + 1), "steps": length}
    return changed_config(config, raw, source="the smoke run's configuration")
