"""Everything the engine can refuse, as one tree.

PfungstError
├── InputError          what the caller handed in cannot be used
│   ├── ImageError      an image of the wrong mode, size, range or type
│   ├── TargetError     a target class that is unknown or already predicted
│   └── RecipeError     a setting out of range, or two settings that exclude each other
├── ModelError          a model on disk cannot be used
│   ├── WeightsError    a weight file is missing, cut short or altered
│   ├── PriorError      a folder is not a generative prior this engine can run
│   └── ClassifierError a classifier answered with the wrong shape, NaN, or not at all
└── Cancelled           the caller's cancel token was set; nothing is wrong

Messages say what is wrong and what to do about it.
"""


class PfungstError(Exception):
    """Base of all errors that Pfungst raises on purpose."""


class InputError(PfungstError):
    """What the caller handed in cannot be used."""


class ImageError(InputError):
    """An image has the wrong mode, size, value range or type."""


class TargetError(InputError):
    """A target class is unknown or is what the classifier says already."""


class RecipeError(InputError):
    """A setting is out of range, or two settings exclude each other."""


class ModelError(PfungstError):
    """A model on disk cannot be used."""


class WeightsError(ModelError):
    """A weight file is missing, cut short or altered."""


class PriorError(ModelError):
    """A folder is not a generative prior this engine can run."""


class ClassifierError(ModelError):
    """A classifier answered with the wrong shape, with NaN, or not at all."""


class Cancelled(PfungstError):
    """The caller's cancel token was set."""
