"""Records of settings: checked, hashed, stored as JSON; and what is wrong with one, in one sentence."""

import hashlib
import json
import pathlib
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from engine.errors import RecipeError


class Settings(BaseModel):
    """The frozen settings of a method; they hold no run state."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    owner: ClassVar[str] = "recipe"
    """What error messages call the record."""

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise RecipeError(wrong_setting(error, self.owner, type(self))) from None

    @property
    def digest(self) -> str:
        """SHA-256 of the settings, independent of their order."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()

    def changed(self, **settings: Any) -> Self:
        """The same record with some settings replaced, validated again."""
        return type(self)(**{**self.model_dump(), **settings})

    def save(self, file: pathlib.Path | str) -> None:
        """The settings are written as JSON."""
        pathlib.Path(file).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, file: pathlib.Path | str) -> Self:
        """The settings stored in a JSON file."""
        try:
            settings = json.loads(pathlib.Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise RecipeError(f"The {cls.owner} {file} cannot be read as JSON: {error}.") from None
        if not isinstance(settings, dict):
            raise RecipeError(f"The {cls.owner} {file} has to hold one JSON object.")
        return cls(**settings)


def wrong_setting(error: ValidationError, owner: str, model: type[BaseModel]) -> str:
    """One sentence for the first wrong setting of `owner`, a record of type `model`, with the value it was given."""
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"The {owner} has no setting {name!r}; it knows {', '.join(model.model_fields)}."
    if first["type"] == "missing":
        return f"The {owner} lacks the setting {name!r}."
    problem = first["msg"].removeprefix("Value error, ").removeprefix("Input ").rstrip(".")
    colon = "" if problem.startswith("should") else ":"
    return f"The {owner}'s setting {name!r}{colon} {problem}, but is {first['input']!r:.80}."
