"""Notes on settings that have no effect in a run of so many steps: harmless, so warned of and not refused."""

from headway.config.optim import WSD
from headway.config.read import TrainConfig
from headway.config.sections import settings_off_default


def warnings(config: TrainConfig, steps: int) -> list[str]:
    """List the settings whose promise the run's length, or another setting, takes away.

    Args:
        config: everything there is to say.
        steps: of the whole run [steps].

    Returns:
        A sentence for each.
    """
    return [*_never_reached(config, steps), *_never_used(config)]


def _never_reached(config: TrainConfig, steps: int) -> list[str]:
    optim, profile = config.optim, config.run.profile
    notes = []
    if optim.warmup_steps >= steps:
        notes.append(
            f"optim.warmup_steps {optim.warmup_steps} leaves none of the {steps} steps for a decay, so the "
            "learning rate only rises"
        )
    elif optim.schedule in WSD and optim.warmup_steps + round(optim.decay_share * steps) > steps:
        notes.append(
            f"optim.decay_share {optim.decay_share:g} of {steps} steps is more than {optim.warmup_steps} steps of "
            "warm-up leave, so the decay is shorter"
        )
    reached = {
        "eval.every": config.eval.every,
        "checkpoint.every": config.checkpoint.every,
        "optim.ema.every": optim.ema and optim.ema.every,
        "the end of run.profile, step": profile and profile.last,
    }
    notes += [f"{name} {at} is never reached in {steps} steps" for name, at in reached.items() if at and at > steps]
    return notes


def _never_used(config: TrainConfig) -> list[str]:
    judged = config.eval
    notes = []
    if not judged.evaluates:
        unused = {
            "data.eval": config.data.eval is not None,
            "eval.generate": judged.generate is not None,
        }
        notes += [
            f"{name} has no effect without eval.every or eval.at_end" for name, is_set in unused.items() if is_set
        ]
    if judged.generate is None and "max_new_tokens" in settings_off_default(judged):
        notes.append("eval.max_new_tokens has no effect without eval.generate")
    return notes
