"""Settings of what a run learns by: sections that objectives bring, and the class of a user's own."""

import hashlib
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import Field, create_model, field_validator

from headway.config.sections import Section
from headway.plugins import objectives

Root = TypeVar("Root", bound=type[Section])


class ObjectiveSection(Section):
    """Section of a configuration that asks for an objective, and what the other sections have to know of it."""

    def check(self, config: Any) -> None:
        """Refuse settings of other sections that cannot go with the objective.

        Args:
            config: all sections, a `headway.config.TrainConfig`.

        Raises:
            ValueError: with what is wrong and the way out.
        """

    @property
    def drops(self) -> bool:
        """True if dropout is on in training unless a run says otherwise."""
        return True

    @property
    def compares_forwards(self) -> bool:
        """True if two forwards of one pack must be of one function, so that dropout is refused."""
        return False

    @property
    def shares_prompts(self) -> bool:
        """True if a prompt stands in a pack once for all of its answers, where the model can."""
        return False

    @property
    def weighs_slots(self) -> bool:
        """True if the factor on a slot's loss follows from the other losses of its pack: the head then runs twice."""
        return False

    @property
    def scores(self) -> bool:
        """True if the model has a head of one column, whose scores are learnt instead of words."""
        return False


class ObjectiveConfig(Section):
    """Class of a user's own that says what a run learns by."""

    path: str = Field(
        description="Subclass of headway.train.objective.Objective, as FILE.py:NAME or module:NAME. Training runs this "
        "file"
    )
    options: dict[str, Any] = Field(default={}, description="Arguments of the class by name")

    @field_validator("path")
    @classmethod
    def _names_a_class(cls, path: str) -> str:
        file, colon, name = path.rpartition(":")
        if not (colon and file and name.isidentifier()):
            raise ValueError("give a file and a class in it, such as mine.py:Distil")
        return path

    @property
    def digest(self) -> str:
        """Digest of the class's file, by which ranks and resumed runs know it again; "" of an installed module."""
        path = Path(self.path.rpartition(":")[0])
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() if path.is_file() else ""


def with_objectives(root: Root) -> Root:
    """Give the whole configuration a section for each objective that is registered, null unless a run asks for it."""
    fields: dict[str, Any] = {
        plugin.section: (plugin.hook("section") | None, Field(default=None, description=plugin.title))  # type: ignore[operator]  # a class
        for plugin in objectives()
    }
    return cast(
        "Root",
        create_model(root.__name__, __base__=root, __module__=root.__module__, __doc__=root.__doc__, **fields),
    )
