"""The paper's own numbers, beside which ours stand."""

from engine.methods import DEFAULT

PAPER_ROW = {"portraits": "CelebA-Blond (Male)", "histology": "Camelyon17 (Hosp.)"}
PAPER1: dict[str, dict[str, dict[str, float]]] = {
    "portraits": {
        "ace": {"na": 0.388, "sparsity": 0.723, "nafr": 0.675, "diversity": 0.432, "gain": 0.134},
        "dime": {"na": 0.1948, "sparsity": 0.7006, "nafr": 0.1948, "diversity": 0.3848, "gain": 0.217},
        "fastdime": {"na": 0.6846, "sparsity": 0.7088, "nafr": 0.2, "diversity": 0.4256, "gain": 0.136},
        "sce": {"na": 0.9886, "sparsity": 0.718, "nafr": 0.865, "diversity": 0.456, "gain": 0.1501},
        DEFAULT: {"na": 1.0, "sparsity": 0.716, "nafr": 0.828, "diversity": 0.358, "gain": 0.216},
    },
    "histology": {
        "ace": {"na": 0.328, "sparsity": 0.409, "nafr": 0.19, "diversity": 0.057, "gain": 0.07},
        "dime": {"na": 0.478, "sparsity": 0.658, "nafr": 0.44, "diversity": 0.125, "gain": -0.038},
        "fastdime": {"na": 0.36, "sparsity": 0.48, "nafr": 0.27, "diversity": 0.035, "gain": 0.163},
        "sce": {"na": 0.953, "sparsity": 0.376, "nafr": 0.505, "diversity": 0.322, "gain": 0.222},
        DEFAULT: {"na": 0.758, "sparsity": 0.539, "nafr": 0.475, "diversity": 0.389, "gain": 0.479},
    },
}
PAPER2: dict[str, dict[str, float]] = {
    "vanilla": {"nafr": 0.28, "na": 0.444, "sparsity": 0.732, "diversity": 0.755},
    "smoothgrad": {"nafr": 0.56, "na": 0.8, "sparsity": 0.728, "diversity": 0.613},
    "smoothdiff": {"nafr": 0.35, "na": 0.522, "sparsity": 0.741, "diversity": 0.75},
    "ig": {"nafr": 0.36, "na": 0.554, "sparsity": 0.732, "diversity": 0.746},
    "smoothgrad_ig": {"nafr": 0.18, "na": 0.295, "sparsity": 0.708, "diversity": 0.673},
    "smoothdiff_ig": {"nafr": 0.23, "na": 0.343, "sparsity": 0.704, "diversity": 0.701},
    "surrogate": {"nafr": 0.72, "na": 0.867, "sparsity": 0.721, "diversity": 0.624},
}
PAPER3: dict[str, dict[str, float]] = {
    "ace": {"seconds_per_sample": 25.05, "peak_mb": 40961},
    "dime": {"seconds_per_sample": 27.04, "peak_mb": 965},
    "fastdime": {"seconds_per_sample": 1.76, "peak_mb": 964},
    "sce": {"seconds_per_sample": 32.40, "peak_mb": 52999},
    DEFAULT: {"seconds_per_sample": 0.66, "peak_mb": 11569},
}
