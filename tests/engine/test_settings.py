"""What is wrong with a setting, in one sentence."""

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from engine.settings import wrong_setting


class Oven(BaseModel):
    """A record of two settings."""

    model_config = ConfigDict(extra="forbid")

    degrees: int = Field(ge=50)
    rack: str = "middle"

    @field_validator("rack")
    @classmethod
    def _known(cls, rack: str) -> str:
        if rack not in ("upper", "middle"):
            raise ValueError("the oven has two racks.")
        return rack


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"degrees": 3}, "The oven's setting 'degrees' should be greater than or equal to 50, but is 3."),
        ({"degrees": 90, "rack": "low"}, "The oven's setting 'rack': the oven has two racks, but is 'low'."),
        ({"degrees": 90, "fan": 1}, "The oven has no setting 'fan'; it knows degrees, rack."),
        ({}, "The oven lacks the setting 'degrees'."),
    ],
)
def test_the_first_wrong_setting_is_named(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        Oven(**settings)
    assert wrong_setting(refusal.value, "oven", Oven) == sentence
