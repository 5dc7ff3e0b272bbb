"""`headway completion`: the script by which a shell completes commands, options, models, devices and settings."""

from typing import Annotated

import typer
from typer._completion_shared import get_completion_script  # which its --show-completion prints; 0.19 to 0.29

from headway.errors import UsageError

SHELLS = ("bash", "zsh", "fish", "pwsh")


def completion(
    shell: Annotated[
        str,
        typer.Argument(
            metavar="|".join(SHELLS),
            help="The shell that reads the script.",
            autocompletion=lambda incomplete: [name for name in SHELLS if name.startswith(incomplete)],
        ),
    ],
) -> None:
    """Print the script by which a shell completes commands, options, models, devices and settings.

    For this shell alone: eval "$(headway completion bash)". For all to come, put that line into ~/.bashrc; of zsh into
    ~/.zshrc, behind compinit; of fish: headway completion fish > ~/.config/fish/completions/headway.fish

    Example: headway completion bash
    """
    if shell not in SHELLS:
        raise UsageError(f"No script is known for the shell {shell!r}. Give one of {', '.join(SHELLS)}.")
    print(get_completion_script(prog_name="headway", complete_var="_HEADWAY_COMPLETE", shell=shell))
