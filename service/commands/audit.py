"""`pfungst audit` judges a classifier, writes the report and answers a pipeline with its exit code."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import InputError
from service.commands.explain import add_prior_arguments

if TYPE_CHECKING:
    from torch import Tensor

    from audit.classifier import Classifier
    from audit.dataset import Dataset
    from audit.report import Names
    from audit.teachers import Teacher
    from service.sources import PriorSource

N_WORLD = 400
N_DISTIL = 2_000
WORLD_SEED = 600_001


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the arguments of `pfungst audit`."""
    parser = subparsers.add_parser("audit", help="say with statistics whether a classifier leans on a spurious feature")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--classifier", metavar="SOURCE", help="Hugging Face folder, .onnx file or endpoint file")
    what.add_argument("--world", choices=("portraits", "histology"), help="an embedded classifier and data set")
    parser.add_argument(
        "--model", choices=("student", "twin"), default="student", help="with --world (default: student)"
    )
    parser.add_argument("--split", metavar="NAME", help="part of the data set, such as test")
    parser.add_argument("--teacher", metavar="SOURCE", help="a trusted classifier that judges the counterfactuals")
    parser.add_argument("--verdicts", type=Path, metavar="FILE", help="JSON of human verdicts by counterfactual")
    parser.add_argument("--label-column", metavar="NAME", help="column with the label")
    parser.add_argument("--policy", type=Path, metavar="FILE", help="YAML with limits (default: built-in)")
    parser.add_argument("--k", type=int, default=2, help="counterfactuals per image (default: 2)")
    parser.add_argument("--batch", type=int, default=8, help="images explained at a time (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="decides the order of the images (default: 0)")
    add_prior_arguments(parser, data="data set: CSV or Parquet manifest, image folder, CelebA or Camelyon17-WILDS")
    parser.add_argument("--out", type=Path, default=Path("out/audit"), metavar="DIR", help="default: %(default)s")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Audits, writes the report and returns the verdict's exit code."""
    if args.out.exists() and not args.out.is_dir():
        raise InputError(f"--out {args.out} is a file; name a folder.")
    if args.batch < 1:
        raise InputError(f"--batch is {args.batch}; it has to be at least 1.")

    from audit.explain import Explainer, distil_pair
    from audit.policy import Policy
    from audit.report import build, write
    from audit.run import audit
    from service.progress import auditing, distilling

    policy = Policy.load(args.policy) if args.policy else Policy()
    case = embedded_case(args) if args.world else given_case(args)
    with distilling() as report:
        surrogates = distil_pair(case.classifier, case.pictures, args.cache, progress=report)
    explainer = Explainer(case.source.prior, case.classifier, surrogates, case.source.recipe.changed(k=args.k))
    with auditing() as watch:
        found = audit(
            explainer, case.dataset, case.teacher, policy, args.out, seed=args.seed, batch=args.batch, progress=watch
        )
    record = build(found, explainer, case.dataset, case.teacher, policy, case.names)
    page = write(record, found, case.dataset)
    print(f"{found.verdict.outcome}: {record.content['headline']}")
    for reason in found.verdict.reasons:
        print(f"  {reason}")
    if found.bad_files:
        print(f"  {found.bad_files}")
    print(f"Open {page.resolve()}")
    return found.verdict.outcome.exit_code


@dataclass(frozen=True)
class Case:
    """What is audited, and with whose help."""

    source: PriorSource
    classifier: Classifier
    dataset: Dataset
    teacher: Teacher
    names: Names
    pictures: Tensor
    """To distil the surrogates on."""


def refuse_with_world(args: argparse.Namespace, *names: str) -> None:
    """An InputError for the first of these options that was given although --world makes it meaningless."""
    for name in names:
        if getattr(args, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} does not go with --world, which brings its own data.")


def embedded_case(args: argparse.Namespace) -> Case:
    """An embedded classifier on its world's unpoisoned pictures, judged by the world's oracle."""
    from service.sources import open_source
    from worlds import WORLDS
    from worlds.audited import audited
    from worlds.store import open_classifier

    refuse_with_world(args, "data", "teacher", "verdicts", "split", "label_column")
    world = WORLDS[args.world]
    source = open_source(args.world, recipe=args.recipe)
    classifier = open_classifier(world, args.model)
    dataset, teacher, names = audited(world, source.prior, N_WORLD, WORLD_SEED)
    return Case(source, classifier, dataset, teacher, names, source.pictures(None))


def given_case(args: argparse.Namespace) -> Case:
    """A classifier and a data set of the user's."""
    from audit.dataset import open_dataset
    from audit.explain import distillation_pictures
    from audit.sources import open_classifier
    from audit.teacher_choice import choose_teacher
    from service.sources import AUTO, closest_embedded, open_source

    if args.data is None:
        raise InputError("--classifier needs --data, the data set it is audited on.")
    classifier = open_classifier(args.classifier)
    prior = args.prior
    if prior == AUTO:
        prior = closest_embedded(
            open_dataset(args.data, size=64, split=args.split, label_column=args.label_column).image(0)
        )
    source = open_source(prior, recipe=args.recipe, revision=args.revision)
    dataset = open_dataset(args.data, size=source.size, split=args.split, label_column=args.label_column)
    teacher, names = choose_teacher(
        source.prior, dataset, classifier.labels, oracle=args.teacher, verdicts=args.verdicts
    )
    pictures = distillation_pictures(dataset, source.prior, N_DISTIL)
    return Case(source, classifier, dataset, teacher, names, pictures)
