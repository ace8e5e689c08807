"""`pfungst explain` makes counterfactuals of one image and writes pictures and JSON."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import InputError
from service.exit_code import ExitCode

if TYPE_CHECKING:
    from engine.methods import AnySettings
    from service.sources import PriorSource

# engine.methods has them; nobody who asks for --help should wait for torch.
DEFAULT_METHOD = "sce-lite-hq"
BASELINES = ("dime", "fastdime", "fastdime-2", "fastdime-2+", "ace", "sce", "diffeocf", "dive")


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the arguments of `pfungst explain`."""
    parser = subparsers.add_parser("explain", help="make counterfactuals of one image")
    parser.add_argument(
        "--classifier", required=True, metavar="SOURCE", help="Hugging Face folder, .onnx or endpoint file"
    )
    parser.add_argument("--image", type=Path, required=True, metavar="FILE", help="PNG, JPEG, WebP or BMP")
    parser.add_argument("--target", metavar="NAME", help="class to reach (default: the second most probable)")
    parser.add_argument("--k", type=int, default=2, help="counterfactuals, disjoint in their edits (default: 2)")
    add_prior_arguments(parser)
    add_method_argument(parser)
    add_runtime_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, help="the same seed makes the same pictures (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("out/explain"), metavar="DIR", help="default: %(default)s")
    parser.set_defaults(run=run)


def add_prior_arguments(
    parser: argparse.ArgumentParser, data: str = "folder of images to distil the surrogates on"
) -> None:
    """The arguments that say which prior, recipe and pictures are used."""
    parser.add_argument(
        "--prior",
        default="auto",
        metavar="NAME",
        help="portraits, histology, portraits-pixel, histology-pixel, a diffusers folder or a hub id",
    )
    parser.add_argument("--revision", metavar="COMMIT", help="40-digit commit of a hub id")
    parser.add_argument(
        "--recipe", type=Path, metavar="FILE", help="recipe that pfungst calibrate wrote, or a method's settings"
    )
    parser.add_argument("--data", type=Path, metavar="PATH", help=data)
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path("out/cache"),
        metavar="DIR",
        help="distilled surrogates (default: %(default)s)",
    )
    parser.add_argument(
        "--max-memory",
        metavar="SIZE",
        help="peak that making counterfactuals may reach, weights included, such as 4GiB or 800MB (default: no limit)",
    )


def add_method_argument(parser: argparse.ArgumentParser) -> None:
    """The argument that says how counterfactuals are made."""
    parser.add_argument(
        "--method",
        default=DEFAULT_METHOD,
        metavar="NAME",
        help=f"{DEFAULT_METHOD} (default), {', '.join(BASELINES)}; --recipe then holds that method's settings",
    )


def add_runtime_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what runs the networks."""
    parser.add_argument(
        "--runtime",
        choices=("auto", "torch", "onnx", "onnx-cuda", "tensorrt"),
        default="auto",
        help="what runs the networks (default: the fastest that is proven on this machine)",
    )
    parser.add_argument("--artifacts", type=Path, metavar="DIR", help="graphs that pfungst export wrote")


def run(args: argparse.Namespace) -> int:
    """Explains `args.image` and prints where the picture is."""
    if args.out.exists() and not args.out.is_dir():
        raise InputError(f"--out {args.out} is a file; name a folder.")

    from audit.explain import Explainer, check_method, choose_target, distil_pair, summary, write_explanation
    from audit.images import read_image, to_square
    from audit.sources import open_classifier
    from engine.memory import byte_count, plan_memory
    from engine.recipe import Recipe
    from engine.runtime.choice import RuntimeChoice, check_choice
    from service.progress import distilling, guiding
    from service.sources import AUTO, closest_embedded, open_source

    budget = None if args.max_memory is None else byte_count(args.max_memory)
    check_method(args.method, args.runtime, budget)
    check_choice(args.runtime, args.artifacts)
    classifier = open_classifier(args.classifier)
    image = read_image(args.image)
    name = closest_embedded(image) if args.prior == AUTO else args.prior
    source = open_source(name, recipe=recipe_file(args), revision=args.revision)
    recipe = settings_of(args, source).changed(k=args.k, seed=args.seed)
    image = to_square(image, source.size)
    target = choose_target(classifier, image, args.target)
    if budget is not None and isinstance(recipe, Recipe):
        # A budget that is too small is said before minutes are spent on surrogates.
        plan_memory(source.prior, recipe, (source.size, source.size), 1, budget, f=classifier)
    with distilling() as report:
        surrogates = distil_pair(classifier, source.pictures(args.data), args.cache, progress=report)
    runtime = RuntimeChoice(args.runtime, source.prior, classifier, surrogates.guide, artifacts=args.artifacts)
    explainer = Explainer(source.prior, classifier, surrogates, recipe, budget, runtime, args.method)
    plan = explainer.plan(image[None])
    with guiding() as watch:
        found = explainer(image[None], [target], plan=plan, progress=watch)[0]
    picture = write_explanation(explainer, found, args.out, plan)
    for k, one in enumerate(summary(explainer, found)["counterfactuals"], start=1):
        outcome = "flipped" if one["flipped"] else "not flipped"
        second = "confirmed" if one["evaluator_flipped"] else "not confirmed"
        print(
            f"counterfactual {k}: {outcome} to {classifier.labels[target]} ({one['target_probability']:.2f}), "
            f"{second} by the evaluator, {one['edited_area']:.0%} of the picture edited"
        )
    if plan is not None:
        print(f"memory: {plan}")
    print(f"Open {picture.resolve()}")
    return ExitCode.PASS


def recipe_file(args: argparse.Namespace) -> Path | None:
    """--recipe where it holds a recipe; with another --method it holds that method's settings."""
    file: Path | None = args.recipe if args.method == DEFAULT_METHOD else None
    return file


def settings_of(args: argparse.Namespace, source: PriorSource) -> AnySettings:
    """The recipe of the prior or of --recipe; with another --method, its authors' settings or those of --recipe."""
    from engine.methods import method_named

    method = method_named(args.method)
    if args.method == DEFAULT_METHOD:
        return source.recipe
    return method.defaults if args.recipe is None else method.load(args.recipe)
