"""`pfungst audit` judges a classifier, writes the report and answers a pipeline with its exit code."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import InputError
from service.commands.explain import (
    DEFAULT_METHOD,
    add_method_argument,
    add_prior_arguments,
    add_runtime_arguments,
    recipe_file,
    settings_of,
)

if TYPE_CHECKING:
    from audit.policy import Policy
    from service.cases import Case


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
    parser.add_argument(
        "--k", type=int, default=1, help="counterfactuals per image; the first speaks for the verdict (default: 1)"
    )
    parser.add_argument("--batch", type=int, default=8, help="images explained at a time (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="decides the order of the images (default: 0)")
    add_prior_arguments(parser, data="data set: CSV or Parquet manifest, image folder, CelebA or Camelyon17-WILDS")
    add_method_argument(parser)
    add_runtime_arguments(parser)
    parser.add_argument(
        "--server",
        metavar="URL",
        help="audit on this service, with the token in PFUNGST_TOKEN; --classifier, --data and --teacher are then ids "
        "of the server, or what is to be uploaded to it",
    )
    parser.add_argument("--out", type=Path, default=Path("out/audit"), metavar="DIR", help="default: %(default)s")
    parser.set_defaults(run=run, default_cache=parser.get_default("cache"))


def run(args: argparse.Namespace) -> int:
    """Audits, writes the report and returns the verdict's exit code."""
    if args.out.exists() and not args.out.is_dir():
        raise InputError(f"--out {args.out} is a file; name a folder.")
    if args.batch < 1:
        raise InputError(f"--batch is {args.batch}; it has to be at least 1.")
    if args.server is not None:
        if args.method != DEFAULT_METHOD:
            raise InputError(f"--method does not go with --server: the service audits by {DEFAULT_METHOD}.")
        from service import remote_audit

        return remote_audit.run(args, args.default_cache)

    from audit.explain import Explainer, check_method, distil_pair
    from audit.policy import Policy
    from audit.report import build, write
    from audit.run import audit
    from engine.memory import byte_count
    from engine.runtime.choice import RuntimeChoice, check_choice
    from service.progress import auditing, distilling

    budget = None if args.max_memory is None else byte_count(args.max_memory)
    check_method(args.method, args.runtime, budget)
    check_choice(args.runtime, args.artifacts)
    policy = Policy.load(args.policy) if args.policy else Policy()
    case = embedded_case(args) if args.world else given_case(args, policy)
    with distilling() as report:
        surrogates = distil_pair(case.classifier, case.pictures, args.cache, progress=report)
    prior, recipe = case.source.prior, settings_of(args, case.source).changed(k=args.k)
    runtime = RuntimeChoice(args.runtime, prior, case.classifier, surrogates.guide, artifacts=args.artifacts)
    explainer = Explainer(prior, case.classifier, surrogates, recipe, budget, runtime, args.method)
    with auditing() as watch:
        found = audit(
            explainer, case.dataset, case.teacher, policy, args.out, seed=args.seed, batch=args.batch, progress=watch
        )
    record = build(found, explainer, case.dataset, case.teacher, policy, case.names)
    page = write(record, found)
    print(f"{found.verdict.outcome}: {record.content['headline']}")
    for reason in found.verdict.reasons:
        print(f"  {reason}")
    if found.bad_files:
        print(f"  {found.bad_files}")
    print(f"Open {page.resolve()}")
    return found.verdict.outcome.exit_code


def refuse_with_world(args: argparse.Namespace, *names: str) -> None:
    """An InputError for the first of these options that was given although --world makes it meaningless."""
    for name in names:
        if getattr(args, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} does not go with --world, which brings its own data.")


def embedded_case(args: argparse.Namespace) -> Case:
    """The case that --world and --model name."""
    from service import cases
    from service.sources import open_source

    refuse_with_world(args, "data", "teacher", "verdicts", "split", "label_column")
    own, pixel = ((args.world, "auto"), f"{args.world}-pixel")
    if args.prior not in (*own, pixel):
        raise InputError(
            f"--prior {args.prior} does not go with --world {args.world}; it has {args.world} and {pixel}."
        )
    # The data set, its oracle and its names are the world's whatever makes the counterfactuals.
    case = cases.embedded_case(args.world, args.model, recipe=recipe_file(args) if args.prior in own else None)
    if args.prior in own:
        return case
    return replace(case, source=open_source(pixel, recipe=recipe_file(args), for_audit=True))


def given_case(args: argparse.Namespace, policy: Policy) -> Case:
    """The case that --classifier and --data name."""
    from audit.sources import open_classifier
    from service import cases

    if args.data is None:
        raise InputError("--classifier needs --data, the data set it is audited on.")
    return cases.given_case(
        open_classifier(args.classifier),
        args.data,
        prior=args.prior,
        recipe=recipe_file(args),
        revision=args.revision,
        split=args.split,
        label_column=args.label_column,
        teacher=args.teacher,
        verdicts=args.verdicts,
        max_bad_share=policy.max_bad_files_share,
    )
