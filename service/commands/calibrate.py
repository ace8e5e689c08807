"""`pfungst calibrate` finds strength, guidance and τ for a prior and a classifier and writes a recipe."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from engine.errors import InputError
from engine.writing import replacing
from service.commands.explain import add_prior_arguments
from service.exit_code import ExitCode


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the arguments of `pfungst calibrate`."""
    parser = subparsers.add_parser("calibrate", help="find the settings for a prior and a classifier")
    parser.add_argument(
        "--classifier", required=True, metavar="SOURCE", help="Hugging Face folder, .onnx or endpoint file"
    )
    add_prior_arguments(parser)
    parser.add_argument("--n", type=int, default=24, help="images that every setting is tried on (default: 24)")
    parser.add_argument("--out", type=Path, default=Path("recipe.json"), metavar="FILE", help="default: %(default)s")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Calibrates and writes the recipe, and beside it what was tried."""
    from audit.calibration import calibrate, choose
    from audit.explain import Explainer, distil_pair
    from audit.sources import open_classifier
    from engine.memory import byte_count, plan_memory
    from service.progress import counting, distilling
    from service.sources import AUTO, open_source

    if args.prior == AUTO:
        raise InputError("calibrate needs --prior: portraits, histology, either with -pixel, a folder or a hub id.")
    if args.n < 4:
        raise InputError(f"--n is {args.n}; calibration needs at least 4 images.")
    budget = None if args.max_memory is None else byte_count(args.max_memory)
    classifier = open_classifier(args.classifier)
    source = open_source(args.prior, recipe=args.recipe, revision=args.revision)
    tried, pictures = source.pictures_to_try(args.data, args.n)
    if budget is not None:
        plan_memory(source.prior, source.recipe, (source.size, source.size), args.n, budget, f=classifier)
    with distilling() as report:
        surrogates = distil_pair(classifier, pictures, args.cache, progress=report)
    explainer = Explainer(source.prior, classifier, surrogates, source.recipe, budget)
    with counting("calibrating", "setting") as watch:
        found = calibrate(explainer, tried, progress=watch)
    with replacing(args.out) as partial:
        found.recipe.save(partial)
    trials = args.out.with_suffix(".trials.json")
    trials.write_text(json.dumps(found.as_dict(), indent=2) + "\n", encoding="utf-8")
    best = choose(found.trials)
    print(
        f"strength {best.strength}, eta {best.eta}, tau {best.tau}: flip rate {best.flip_rate:.2f}, "
        f"confirmed by the evaluator {best.nafr:.2f}, median area {best.area_median:.0%} (n = {found.n})"
    )
    print(f"Wrote {args.out} and {trials}")
    return ExitCode.PASS
