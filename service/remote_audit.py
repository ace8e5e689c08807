"""What `pfungst audit --server` does: the audit runs on a server, its files and its exit code arrive here.

Whatever this machine alone would decide, such as a cache folder or a runtime, is the server's operator's choice there,
and is refused here rather than passed over. What the command uploads it removes again when the audit has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tqdm import tqdm

from engine.errors import Cancelled, InputError
from service.exit_code import ExitCode

if TYPE_CHECKING:
    from service.client import Client, Event, Job

PATIENCE = 120.0
"""A server that is restarted goes on with its jobs; so long is it waited for."""
CANCEL_SECONDS = 10.0
EXIT_CODES = {
    "PASS": ExitCode.PASS,
    "FAIL": ExitCode.SPURIOUS_RELIANCE,
    "INCONCLUSIVE": ExitCode.INCONCLUSIVE,
}
LAST = ("journal.jsonl", "report.json")
OPERATORS = {
    "recipe": "the server has the recipes of its priors",
    "revision": "the server's operator says which priors there are",
    "verdicts": "people's verdicts are of counterfactuals that are not made yet",
    "split": "the server's operator configures it with the data set",
    "label_column": "the server's operator configures it with the data set",
    "max_memory": "the memory is the server's",
    "artifacts": "the server chooses what runs its networks",
}
"""Options that say nothing to a server, and why."""
WORLDS_OWN = ("data", "teacher")


class StillRunning(OSError):
    """The server was lost while it worked."""


def run(args: argparse.Namespace, default_cache: Path) -> int:
    """Audits on `args.server`, writes what it found into `args.out` and returns the verdict's exit code."""
    refuse_local_options(args, default_cache)

    from audit.policy import Policy
    from service.client import Client

    policy = Policy.load(args.policy) if args.policy else Policy()
    with Client(args.server, patience=PATIENCE) as client, uploads(client) as named:
        request: dict[str, Any] = {
            "policy": policy.model_dump(mode="json"),
            "k": args.k,
            "batch": args.batch,
            "seed": args.seed,
        }
        if args.world:
            classifier = f"{args.world}/{args.model}"
        else:
            classifier = named("classifier", args.classifier)
            request["dataset"] = named("data", str(args.data))
        if args.teacher is not None:
            request["teacher"] = named("teacher", args.teacher)
        if args.prior != "auto":
            request["prior"] = args.prior
        job = client.submit_audit(classifier, **request)
        job = followed(client, job)
        return received(client, job, args.out)


def refuse_local_options(args: argparse.Namespace, default_cache: Path) -> None:
    """An InputError for the first option that makes no sense with --server, or with --world."""
    for name, why in OPERATORS.items():
        if getattr(args, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} does not go with --server: {why}.")
    if args.cache != default_cache:
        raise InputError("--cache does not go with --server: the server keeps its own surrogates.")
    if args.runtime != "auto":
        raise InputError("--runtime does not go with --server: the server chooses what runs its networks.")
    if args.world:
        for name in WORLDS_OWN:
            if getattr(args, name) is not None:
                raise InputError(f"--{name} does not go with --world, which brings its own data.")
    elif args.data is None:
        raise InputError("--classifier needs --data, the data set it is audited on: an id of the server, or a folder.")
    if (args.out / "journal.jsonl").exists():
        raise InputError(f"--out {args.out} holds an audit already; name another folder, or delete that one.")


@contextmanager
def uploads(client: Client) -> Iterator[Callable[[Literal["classifier", "data", "teacher"], str], str]]:
    """A function that gives the server's id for an option's value, and uploads what is a file or folder here."""
    sent: list[Callable[[], None]] = []

    def named(option: Literal["classifier", "data", "teacher"], value: str) -> str:
        what = "data set" if option == "data" else "classifier"
        found = client.datasets() if option == "data" else client.classifiers()
        path = Path(value)
        if value in {one.id for one in found}:
            if path.exists():
                raise InputError(
                    f"--{option} {value} is a {what} of the server and a path here; for that write {path.absolute()}."
                )
            return value
        if not path.exists():
            known = ", ".join(one.id for one in found)
            raise InputError(f"--{option} {value} is no {what} of the server and no path here; the server has {known}.")
        if option == "data":
            check_dataset_path(path)
            dataset = client.upload_dataset(path)
            sent.append(lambda: client.delete_dataset(dataset.id))
            return dataset.id
        check_classifier_path(option, path)
        classifier = client.upload_classifier(path)
        sent.append(lambda: client.delete_classifier(classifier.id))
        return classifier.id

    def remove_all() -> None:
        for remove in sent:
            # The verdict is there, or an error that says more than this one would.
            with contextlib.suppress(InputError, OSError):
                remove()

    try:
        yield named
    except StillRunning:
        raise  # the audit needs them
    except BaseException:
        remove_all()
        raise
    remove_all()


def check_classifier_path(option: str, path: Path) -> None:
    """What can be uploaded as a classifier."""
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        raise InputError(f"--{option} {path} is a remote endpoint; the server's operator configures those.")
    if not path.is_dir() and path.suffix.lower() != ".onnx":
        raise InputError(f"--{option} {path} cannot be sent: with --server it is an id, a folder or an ONNX file.")


def check_dataset_path(path: Path) -> None:
    """What can be uploaded as a data set."""
    if not path.is_dir() and path.suffix.lower() != ".zip":
        raise InputError(f"--data {path} cannot be sent: with --server it is an id, a folder or a zip file.")


def followed(client: Client, job: Job) -> Job:
    """The job when it has ended; it is cancelled where this process is interrupted."""
    try:
        with following() as watch:
            return client.wait(job, watch)
    except KeyboardInterrupt:
        cancel(client, job)
        raise
    except OSError as error:
        raise StillRunning(f"{error} The audit {job.id} may go on there.") from None


def cancel(client: Client, job: Job) -> None:
    """Ends a job, and waits a little until it has ended: what was uploaded for it can go then."""
    with contextlib.suppress(InputError, OSError):
        client.patience = 0.0
        job = client.cancel(job)
        until = time.monotonic() + CANCEL_SECONDS
        while not job.ended and time.monotonic() < until:
            time.sleep(0.2)
            job = client.job(job.id)


@contextmanager
def following() -> Iterator[Callable[[Event], None]]:
    """A bar on stderr that shows the stage and how far it is."""
    with tqdm(desc="queued", leave=False) as bar:

        def report(event: Event) -> None:
            if event.kind == "state":
                bar.set_description(str(event.data.get("state")))
                return
            told = event.progress
            if told.stage != stages[-1]:
                stages.append(told.stage)
                bar.reset(told.total)
                bar.set_description(told.stage)
            bar.total = told.total
            bar.update((told.done or 0) - bar.n)

        stages: list[str | None] = [None]
        yield report


def received(client: Client, job: Job, out: Path) -> int:
    """Writes the files of an audit that succeeded into `out` and prints its verdict; says why another one did not."""
    if job.state == "cancelled":
        raise Cancelled("The audit was cancelled on the server.")
    if job.state != "succeeded":
        message = job.error.message if job.error else f"The audit ended {job.state}."
        if job.error is not None and job.error.code in ("bad_input", "bad_model"):
            raise InputError(message)
        raise OSError(message)

    from service.client import unpack

    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".download-") as folder:
        archive = Path(folder) / "archive.zip"
        client.download(job, "archive.zip", archive)
        unpack(archive, out, LAST)
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    print(f"{report['verdict']}: {report['headline']}")
    for reason in report["reasons"]:
        print(f"  {reason}")
    if unreadable := report.get("data", {}).get("unreadable"):
        print(f"  {len(unreadable)} pictures could not be read: {', '.join(sorted(unreadable)[:5])}")
    print(f"Open {(out / 'report.html').resolve()}")
    return EXIT_CODES[report["verdict"]]
