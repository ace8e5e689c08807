"""`pfungst export` writes a prior and a classifier's guide as proven ONNX graphs."""

from __future__ import annotations

import argparse
from pathlib import Path

from engine.errors import InputError
from service.commands.explain import add_prior_arguments
from service.exit_code import ExitCode


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the arguments of `pfungst export`."""
    parser = subparsers.add_parser("export", help="write ONNX graphs of the guided loop, gradient included")
    parser.add_argument("--classifier", type=Path, required=True, metavar="DIR", help="Hugging Face folder")
    add_prior_arguments(parser)
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16"), default="fp32", help="default: %(default)s")
    parser.add_argument(
        "--resolution", type=int, metavar="PIXELS", help="side of the images (default: the prior's own)"
    )
    parser.add_argument(
        "--batch",
        default="1-8",
        help="1,8 for a graph per size, 1-8 for one of any size up to 8 (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, default=Path("out/export"), metavar="DIR", help="default: %(default)s")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exports, proves every graph against torch and prints the figures."""
    if args.out.exists() and not args.out.is_dir():
        raise InputError(f"--out {args.out} is a file; name a folder.")

    from audit.classifier import load_classifier
    from audit.explain import distil_pair
    from export.artifact import Batches, write_artifact
    from service.progress import counting, distilling
    from service.sources import AUTO, open_source

    if args.prior == AUTO:
        raise InputError("export needs --prior: portraits, histology, either with -pixel, a folder or a hub id.")
    batches = Batches.parse(args.batch)
    classifier = load_classifier(args.classifier)
    source = open_source(args.prior, recipe=args.recipe, revision=args.revision)
    size = source.size if args.resolution is None else args.resolution
    source.prior.latent_shape(size, size)  # refuses a size that the prior cannot take before surrogates are distilled
    pictures = source.pictures(args.data)
    if source.recipe.gradient == "surrogate":
        with distilling() as report:
            guide = distil_pair(classifier, pictures, args.cache, progress=report).guide.network
    else:
        guide = classifier
    with counting("exporting", "graph") as watch:
        manifest = write_artifact(
            source.prior,
            guide,
            source.recipe,
            args.out,
            size=(size, size),
            batches=batches,
            precision=args.precision,
            classifier=classifier,
            pictures=pictures,
            progress=lambda what, done, total: watch(done, total),
        )
    for name, figures in manifest.parity["graphs"].items():
        worst = max(figures.values(), key=lambda figure: figure["error"])
        print(f"{name}: relative error {worst['error']:.1e}, cosine {worst['cosine']:.6f} against torch")
    loop = manifest.parity["loop"]
    same = "the same" if loop["flips_identical"] else "not the same"
    print(f"whole loop: {same} flips on {loop['n']} images, mask IoU at least {loop['mask_iou']:.3f}")
    print(f"Wrote {args.out.resolve()}")
    return ExitCode.PASS
