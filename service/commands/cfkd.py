"""`pfungst cfkd` makes the debiasing set of an audit, and with --finetune repairs the classifier with it.

Exit codes: 0 when the set, and the repaired classifier if asked for, is written; 0 too where an audit that passed has
nothing false to learn from; 3 where one that did not pass has nothing false either, since then nothing is known.
Whether a repaired classifier may be deployed is for `pfungst audit` to say; cfkd.json names the last audit's verdict.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from audit.finetune_settings import FinetuneSettings
from engine.errors import InputError
from service.commands.audit import embedded_case, given_case, refuse_with_world
from service.commands.explain import DEFAULT_METHOD, add_prior_arguments
from service.exit_code import ExitCode

if TYPE_CHECKING:
    from audit.cfkd import FinishedAudit
    from audit.classifier import HuggingFaceClassifier
    from service.cases import RepairCase


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the arguments of `pfungst cfkd`."""
    parser = subparsers.add_parser("cfkd", help="turn an audit into data that repairs the classifier, and repair it")
    parser.add_argument("--audit", type=Path, required=True, metavar="DIR", help="folder of a finished audit")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where set/ and cfkd.json are written")
    parser.add_argument(
        "--include-true", action="store_true", help="learn from true counterfactuals too, with the target's label"
    )
    repair = parser.add_argument_group("repair")
    repair.add_argument("--finetune", action="store_true", help="repair the classifier that was audited")
    repair.add_argument("--rounds", type=int, default=1, metavar="R", help="most rounds of repair (default: 1)")
    steps, rate = FinetuneSettings.steps, FinetuneSettings.rate
    repair.add_argument(
        "--steps", type=int, default=steps, help="fine-tuning steps of each round (default: %(default)s)"
    )
    repair.add_argument("--rate", type=float, default=rate, help="learning rate (default: %(default)s)")
    repair.add_argument("--seed", type=int, default=0, help="the same seed gives the same weights (default: 0)")
    repair.add_argument(
        "--no-reaudit", action="store_true", help="do not audit the repaired classifier (one round only)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--classifier", metavar="DIR", help="Hugging Face folder of the classifier that was audited")
    what.add_argument("--world", choices=("portraits", "histology"), help="an embedded classifier and its data")
    parser.add_argument(
        "--model", choices=("student", "twin"), default="student", help="with --world (default: student)"
    )
    parser.add_argument("--train-data", type=Path, metavar="PATH", help="data like the classifier's training data")
    parser.add_argument("--train-split", metavar="NAME", help="part of the training data")
    parser.add_argument("--test-data", type=Path, metavar="PATH", help="unpoisoned data with a group column")
    parser.add_argument("--test-split", metavar="NAME", help="part of the test data")
    parser.add_argument("--group-column", metavar="NAME", help="column of the test data with the confounder")
    parser.add_argument("--label-column", metavar="NAME", help="column with the label, in all data")
    parser.add_argument("--split", metavar="NAME", help="part of --data that was audited")
    parser.add_argument("--teacher", metavar="SOURCE", help="a trusted classifier that judges in further audits")
    add_prior_arguments(parser, data="data set that was audited, to audit the repaired classifier on it")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes the set; with --finetune also the repaired classifier and cfkd.json."""
    if args.out.exists() and not args.out.is_dir():
        raise InputError(f"--out {args.out} is a file; name a folder.")
    if args.finetune and not (args.world or args.classifier):
        raise InputError("--finetune needs the classifier that was audited: --world, or --classifier with its data.")

    from audit.cfkd import FinishedAudit, build_set
    from audit.verdict import Outcome

    audit = FinishedAudit.read(args.audit)
    if not any(audit.lessons(args.include_true)):
        if audit.outcome is Outcome.PASS:
            print("The audit passed, and none of its counterfactuals is false: there is nothing to repair.")
            return ExitCode.PASS
        print(
            f"The audit ended {audit.outcome} without a valid counterfactual that was judged false: there is nothing "
            "to learn from. Audit more images, or name a teacher that can judge them."
        )
        return ExitCode.INCONCLUSIVE
    if args.finetune:
        return _repair(args, audit)
    found = build_set(args.audit, args.out / "set", include_true=args.include_true)
    labels = ", ".join(f"{n} {label}" for label, n in found.table["label"].value_counts().sort_index().items())
    print(f"{len(found)} counterfactuals to learn from: {labels}")
    print(f"Open {(found.folder / 'README.md').resolve()}")
    return ExitCode.PASS


def _repair(args: argparse.Namespace, audit: FinishedAudit) -> int:
    from audit.cfkd import repair
    from service.progress import counting

    settings = FinetuneSettings(steps=args.steps, rate=args.rate)
    case = _world_case(args) if args.world else _given_case(args, audit)
    again = None if args.no_reaudit else _Reaudit(args, audit)
    content = repair(
        case.classifier,
        case.source,
        args.audit,
        case.originals,
        case.ordinary,
        case.test,
        args.out,
        rounds=args.rounds,
        seed=args.seed,
        include_true=args.include_true,
        settings=settings,
        audit_again=again,
        watch=lambda title: counting(title, "step"),
    )
    _say(content)
    print(f"Open {(args.out / 'cfkd.json').resolve()}")
    return ExitCode.PASS


def _say(content: dict[str, Any]) -> None:
    """The repair in a few lines."""
    gained = content["gain"]
    print("gain: " + ("none was possible" if gained is None else f"{gained:.2f} of the group error is gone"))
    for name, title in (
        ("worst_group", "worst group"),
        ("aga", "average of the groups"),
        ("accuracy", "accuracy on unpoisoned data"),
        ("poisoned", "accuracy on data like the training data"),
        ("ece", "calibration error"),
    ):
        print(f"  {title}: {content[f'{name}_before']:.3f} → {content[f'{name}_after']:.3f}")
    if content["verdict_after"] is not None:
        print(f"  verdict: {content['verdict_before']} → {content['verdict_after']}")
    for note in content["notes"]:
        print(f"  {note}")


def _world_case(args: argparse.Namespace) -> RepairCase:
    """The repair that --world and --model name."""
    from service.cases import embedded_repair

    refuse_with_world(args, "train_data", "train_split", "test_data", "test_split", "group_column")
    return embedded_repair(args.world, args.model)


def _given_case(args: argparse.Namespace, audit: FinishedAudit) -> RepairCase:
    """The repair that --classifier, --train-data and --test-data name."""
    from audit.images import read_image
    from service.cases import given_repair
    from service.configuration import DatasetSource

    for name in ("train_data", "test_data", "group_column"):
        if getattr(args, name) is None:
            raise InputError(f"--finetune with --classifier needs --{name.replace('_', '-')}.")
    if args.data is None and not args.no_reaudit:
        raise InputError(
            "To audit the repaired classifier, --data has to name the data set that was audited; or say --no-reaudit."
        )
    return given_repair(
        Path(args.classifier),
        DatasetSource(path=args.train_data, split=args.train_split, label_column=args.label_column),
        DatasetSource(path=args.test_data, split=args.test_split, label_column=args.label_column),
        args.group_column,
        size=int(read_image(audit.picture(audit.images[0].original)).shape[-1]),
        seed=args.seed,
    )


class _Reaudit:
    """Audits a repaired classifier as the first one was: same data, prior, recipe, policy and order of images."""

    def __init__(self, args: argparse.Namespace, audit: FinishedAudit) -> None:
        from audit.policy import Policy
        from engine.methods import method_named

        # A person's verdicts are of the first audit's counterfactuals; these are others of the same names.
        args.verdicts = None
        args.method = audit.hashes.get("method", DEFAULT_METHOD)
        self.policy, self.method = Policy(**audit.report["policy"]), args.method
        self.recipe = method_named(self.method).defaults.changed(**audit.report["recipe"])
        self.case = embedded_case(args) if args.world else given_case(args, self.policy)
        self.cache, self.first = args.cache, audit
        for name, now in (("data", self.case.dataset.content_hash), ("prior", self.case.source.prior.content_hash)):
            if audit.hashes[name] != now:
                raise InputError(f"The {name} to audit with again is not that of the audit in {audit.folder}.")

    def __call__(self, classifier: HuggingFaceClassifier, out: Path) -> None:
        """Distils surrogates of the repaired classifier, audits it and writes the report into `out`."""
        from audit.explain import Explainer, distil_pair
        from audit.report import build, write
        from audit.run import audit
        from service.progress import auditing, distilling

        case, hashes = self.case, self.first.hashes
        with distilling() as report:
            surrogates = distil_pair(classifier, case.pictures, self.cache, progress=report)
        explainer = Explainer(case.source.prior, classifier, surrogates, self.recipe, method=self.method)
        with auditing() as watch:
            found = audit(
                explainer,
                case.dataset,
                case.teacher,
                self.policy,
                out,
                seed=hashes["seed"],
                batch=hashes["batch"],
                progress=watch,
            )
        write(build(found, explainer, case.dataset, case.teacher, self.policy, case.names), found)
