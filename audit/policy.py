"""What an organisation tolerates and asks for: the limits of a verdict, as one frozen record read from YAML."""

import datetime
import hashlib
import json
import pathlib
from collections import Counter
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from engine.errors import InputError

__all__ = ["AcceptedFinding", "Policy", "direction_name"]

LARGEST_FILE = 1 << 20
ARROW = " → "


def direction_name(source: str, target: str) -> str:
    """How a direction is written everywhere: "dark → blond"."""
    return f"{source}{ARROW}{target}"


def _one_arrow(value: Any) -> Any:
    """Keyboards have no arrow: "dark -> blond" is read as "dark → blond"."""
    if not isinstance(value, str):
        return value
    return ARROW.join(part.strip() for part in value.replace("->", "→").split("→"))


def _no_switch(value: Any) -> Any:
    """YAML reads yes, no, on and off as switches, which would pass for the numbers 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("should be a number")
    return value


Share = Annotated[float, BeforeValidator(_no_switch), Field(ge=0, le=1)]
Limit = Annotated[float, BeforeValidator(_no_switch), Field(gt=0, lt=1)]
Count = Annotated[int, BeforeValidator(_no_switch), Field(ge=1, le=1_000_000)]
Direction = Annotated[str, BeforeValidator(_one_arrow), StringConstraints(min_length=1, max_length=400)]
Reason = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=1000)]


class AcceptedFinding(BaseModel):
    """A direction whose reliance is known and tolerated up to a higher limit, until a date."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    direction: Direction = Field(description='such as "dark → blond"; -> is read as →')
    reason: Reason = Field(description="why it is tolerated, and by whom; printed in the verdict")
    limit: Annotated[float, BeforeValidator(_no_switch), Field(gt=0, le=1)] = Field(
        1.0, description="reliance tolerated instead of the policy's limit; 1 takes the direction out of the verdict"
    )
    expires: datetime.date = Field(description="the last day on which it is accepted")

    def holds(self, today: datetime.date) -> bool:
        """Whether it is still accepted; the day of expiry is the last."""
        return today <= self.expires


class Policy(BaseModel):
    """The limits of a verdict. `audit.verdict` says what each of them can block."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # The question.
    limit: Limit = Field(0.2, description="largest spurious reliance that is tolerated in any direction")
    alpha: Annotated[float, BeforeValidator(_no_switch), Field(gt=0, lt=0.5)] = Field(
        0.05, description="largest probability of a wrong PASS, and of a wrong FAIL"
    )

    # How long to look.
    min_images: Count = Field(20, description="measured images without which there is no verdict")
    min_per_direction: Count = Field(10, description="measured images of each direction without which nothing passes")
    max_images: Count = Field(200, description="audited images after which an audit gives up")

    # When a measurement is worth believing.
    min_flip_rate: Share = Field(0.8, description="share of the images of each direction that have to be flipped")
    min_measured_share: Share = Field(0.5, description="share of the flipped images that the teacher has to judge")
    min_evaluator_agreement: Share = Field(0.9, description="agreement of the evaluator with the classifier")
    min_teacher_accuracy: Share = Field(0.95, description="accuracy of the teacher on original images")
    max_bad_files_share: Share = Field(0.05, description="share of a data set's files that may be unreadable")

    accepted: tuple[AcceptedFinding, ...] = Field((), max_length=1000)

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise InputError(_sentence(error)) from None

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if self.min_images > self.max_images:
            raise ValueError(f"min_images ({self.min_images}) should not be above max_images ({self.max_images})")
        seen = set()
        for finding in self.accepted:
            if finding.direction in seen:
                raise ValueError(f"accepted should name each direction once, but {finding.direction!r} is there twice")
            if finding.limit <= self.limit:
                raise ValueError(
                    f"accepted should raise the limit of {self.limit}, "
                    f"but the one of {finding.direction!r} is {finding.limit}"
                )
            seen.add(finding.direction)
        return self

    @property
    def digest(self) -> str:
        """SHA-256 of the settings, independent of their order."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()

    def finding(self, direction: str) -> AcceptedFinding | None:
        """The accepted finding of a direction, expired or not."""
        return next((finding for finding in self.accepted if finding.direction == direction), None)

    def limit_of(self, direction: str, today: datetime.date) -> float:
        """The limit that holds for a direction on a day."""
        finding = self.finding(direction)
        return finding.limit if finding and finding.holds(today) else self.limit

    @classmethod
    def load(cls, file: pathlib.Path | str) -> "Policy":
        """The policy stored in a YAML file; settings that it leaves out keep their defaults."""
        try:
            with pathlib.Path(file).open("rb") as stream:
                content = stream.read(LARGEST_FILE + 1)
            if len(content) > LARGEST_FILE:
                raise InputError(f"The policy {file} is larger than {LARGEST_FILE} bytes; it should be a few lines.")
            settings = yaml.load(content.decode("utf-8"), _PolicyLoader)
        except OSError as error:
            raise InputError(f"The policy {file} cannot be read: {error.strerror}.") from None
        except (UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
            raise InputError(f"The policy {file} cannot be read as YAML: {_first_problem(error)}.") from None
        if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
            raise InputError(f"The policy {file} has to hold settings by name, such as 'limit: 0.2'.")
        return cls(**settings)


class _PolicyLoader(yaml.SafeLoader):
    """YAML's safe loader, without the two things that let a policy mean something else than it says."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Aliases are refused: nested ones make a small file grow without end."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(None, None, "aliases are not allowed", self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A name that comes twice is refused: the later limit would win in silence."""
        names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for name, count in names.items():
            if count > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{name!r} is there twice", node.start_mark)
        return super().construct_mapping(node, deep=deep)


def _first_problem(error: Exception) -> str:
    """What a YAML error complains of, and in which line."""
    if isinstance(error, yaml.MarkedYAMLError):
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        return f"{error.problem or error.context}{line}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error).splitlines()[0].rstrip(".")


def _sentence(error: ValidationError) -> str:
    """One sentence for the first thing that is wrong in a policy."""
    first = error.errors(include_url=False)[0]
    problem = first["msg"].removeprefix("Value error, ").removeprefix("Input ").rstrip(".")
    if not first["loc"]:
        return f"In the policy, {problem}."
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = AcceptedFinding.model_fields if len(first["loc"]) > 1 else Policy.model_fields
        return f"The policy has no setting {name!r:.80}; it knows {', '.join(known)}."
    if first["type"] == "missing":
        return f"The policy's setting {name!r} is missing."
    return f"The policy's setting {name!r} {problem[0].lower()}{problem[1:]}, but is {first['input']!r:.80}."
