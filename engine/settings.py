"""Records of settings: what is wrong with one, in one sentence."""

from pydantic import BaseModel, ValidationError


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
