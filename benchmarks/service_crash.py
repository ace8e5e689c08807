"""Workers killed at random moments while they audit: `python -m benchmarks.service_crash --json FILE`.

Real workers audit a classifier again and again, and one of them after the other gets SIGKILL, at moments that a seed
decides: while it opens models, distils, guides, writes a picture, a line of the journal or the report. Only kills that
hit a worker at a job are counted. Afterwards all jobs are let finish, and each has to end as if nothing had happened:

    lost        finished images that somebody saw in a journal and that are not in the same place of the final one
    duplicated  images that are in a final journal twice
    different   images or pictures that are not those of an audit that nobody disturbed
    missing     pictures or reports that a final journal names and the artifacts do not hold
    unfinished  jobs that did not succeed

Exit code 1 unless all five are 0. Workers import the code anew, so it must not change while this runs.
"""

import argparse
import json
import os
import platform
import random
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from audit.pictures import save_png, to_pil
from engine.writing import write_text
from service import executor as executor_module
from service.artifacts import ArtifactStore
from service.configuration import Configuration
from service.executor import LocalExecutor
from service.jobs import Job, JobState, JobTable
from service.worker import open_table
from worlds import WORLDS
from worlds.store import WEIGHTS

WORLD = WORLDS["portraits"]
KILLS = 20
SEED = 1907
SPREAD = 2.0
HAND_BACK_SECONDS = 5.0
"""Within this the executor has handed back a dead worker's job; where none came back, it had none."""
IMAGES = 8
N_PICTURES = 40
JOURNAL = "journal.jsonl"
REPORTS = ("report.html", "report.json", "junit.xml", "summary.md", JOURNAL)


@dataclass(frozen=True)
class Kill:
    """One worker's end."""

    number: int
    seconds: float
    """Since the first job was submitted."""
    stage: str
    finished: int
    """Images that were in the journal of the job by then."""


@dataclass
class Found:
    """What 20 kills did."""

    kills: list[Kill] = field(default_factory=list)
    jobs: int = 0
    images: int = 0
    lost: int = 0
    duplicated: int = 0
    different: int = 0
    missing: int = 0
    unfinished: int = 0
    notes: list[str] = field(default_factory=list)
    """What exactly was harmed."""
    seconds: float = 0.0

    @property
    def unharmed(self) -> bool:
        """Whether nothing was lost, done twice or left undone."""
        return not (self.lost or self.duplicated or self.different or self.missing or self.unfinished)


class LateError(Exception):
    """It took longer than the time that was given."""


def write_pictures(folder: Path) -> Path:
    """Portraits as an image folder."""
    sample = WORLD.sample(N_PICTURES, 5)
    for n, (image, label) in enumerate(zip(sample.images, sample.labels.tolist(), strict=True)):
        (folder / WORLD.labels[label]).mkdir(parents=True, exist_ok=True)
        save_png(to_pil(image), folder / WORLD.labels[label] / f"{n:03d}.png")
    return folder


def configured(home: Path, name: str, workers: int) -> Configuration:
    """A service's folder; all of a run share the pictures and the surrogates."""
    folder = home / name
    folder.mkdir(parents=True)
    (home / "cache").mkdir(exist_ok=True)
    (folder / "cache").symlink_to(home / "cache")
    small = {"path": home / "pictures", "teacher": WEIGHTS / WORLD.name / "oracle", "prior": WORLD.name}
    return Configuration(
        folder=folder,
        datasets={"small": small},
        workers=workers,
        threads=1,
        surrogate_steps=3,
        surrogate_pictures=20,
        heartbeat_seconds=0.2,
        sync_images=2,
        max_attempts=1_000,  # by design a job that only ever kills its workers fails; here the workers are innocent
    )


def request(images: int) -> dict[str, Any]:
    """An audit of so many images, whatever they show."""
    policy = {"min_images": 2, "min_per_direction": 1, "max_images": images, "limit": 0.9}
    asked = {"classifier": f"{WORLD.name}/student", "dataset": "small", "k": 1, "steps": 6, "batch": 1}
    return asked | {"policy": policy}


def wait_until(what: Callable[[], bool], deadline: float) -> None:
    """Returns when something is true."""
    while not what():
        if time.monotonic() > deadline:
            raise LateError
        time.sleep(0.02)


def whole_lines(configuration: Configuration, job: str) -> list[bytes]:
    """What of a job's journal has reached the disk."""
    try:
        content = (configuration.work_folder(job) / JOURNAL).read_bytes()
    except FileNotFoundError:
        return []
    return content[: content.rfind(b"\n") + 1].splitlines()


class Killing:
    """Kills workers and remembers what was finished by then."""

    def __init__(self, configuration: Configuration, images: int, seed: int, spread: float, deadline: float) -> None:
        self.configuration, self.images, self.spread, self.deadline = configuration, images, spread, deadline
        self.rng = random.Random(seed)
        self.table = open_table(configuration)
        self.executor = LocalExecutor(configuration, self.table)
        self.seen: dict[str, list[bytes]] = {}
        self.start = time.monotonic()

    def run(self, kills: int) -> list[Kill]:
        """Kills so many workers, then lets every job end."""
        done: list[Kill] = []
        self.executor.start()
        try:
            while len(done) < kills:
                self.keep_busy()
                wait_until(lambda: self.running() >= min(2, self.configuration.workers), self.deadline)
                self.wait_for_moment()
                found = self.kill(len(done) + 1)
                if found is not None:
                    done.append(found)
                    print(
                        f"kill {found.number:2} after {found.seconds:5.0f} s: {found.stage}, {found.finished} images",
                        flush=True,
                    )
            wait_until(self.all_ended, self.deadline)
        finally:
            self.executor.stop(10)
        return done

    def wait_for_moment(self) -> None:
        """Some more images, sometimes none, so that kills meet all parts of a job however slow the machine; then any
        moment."""
        images = self.finished() + self.rng.randint(0, self.images - 1)
        # Jobs may end before so many are done; then this moment is as good as any.
        wait_until(lambda: self.finished() >= images or self.all_ended(), self.deadline)
        time.sleep(self.rng.uniform(0, self.spread))

    def finished(self) -> int:
        """Images that were ever in a journal."""
        self.look()
        return sum(max(0, len(lines) - 1) for lines in self.seen.values())

    def keep_busy(self) -> None:
        """More jobs than workers, so that none is idle when its turn comes."""
        ended = sum(job.state.finished for job in self.all_jobs())
        while len(self.seen) - ended <= self.configuration.workers:
            job, _ = self.table.submit("audit", "benchmark", request(self.images))
            self.seen[job.id] = []
            self.executor.wake()

    def kill(self, number: int) -> Kill | None:
        """Kills a worker; None where it had no job at that moment."""
        before = self.table.list(state=JobState.RUNNING)
        pids = self.executor.pids
        if not before or not pids:
            return None
        victim = self.rng.choice(pids)
        seconds = time.monotonic() - self.start
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: victim not in self.executor.pids, self.deadline)
        self.look()
        until = time.monotonic() + HAND_BACK_SECONDS
        while time.monotonic() < until:
            for job in before:
                now = self.table.get(job.id)
                if now is not None and now.worker != job.worker and not now.state.finished:
                    stage = str(job.progress.get("stage", "starting"))
                    return Kill(number, round(seconds, 1), stage, max(0, len(self.seen[job.id]) - 1))
            time.sleep(0.05)
        return None

    def look(self) -> None:
        """Notes every line that is on the disk; from now on it has to stay."""
        for id, lines in self.seen.items():
            now = whole_lines(self.configuration, id)
            if len(now) > len(lines):
                self.seen[id] = now

    def all_jobs(self) -> list[Job]:
        return [job for id in self.seen if (job := self.table.get(id)) is not None]

    def running(self) -> int:
        return self.table.counts()[JobState.RUNNING.value]

    def all_ended(self) -> bool:
        return all(job.state.finished for job in self.all_jobs())


def timeless(line: bytes) -> dict[str, Any]:
    """A journal's line without how long it took."""
    return {name: value for name, value in json.loads(line).items() if name != "seconds"}


def contents(store: ArtifactStore, job: str, names: Sequence[str]) -> dict[str, bytes]:
    """Files of a job."""
    found = {}
    for name in names:
        with store.open(job, name) as stream:
            found[name] = stream.read()
    return found


def judge(killing: Killing, store: ArtifactStore, expected: Job, expected_store: ArtifactStore) -> Found:
    """Holds every job against what was seen of it and against the undisturbed one."""
    found = Found(jobs=len(killing.seen))
    wanted = contents(expected_store, expected.id, [JOURNAL])[JOURNAL].splitlines()
    pictures = [name for name in expected_store.names(expected.id) if name.startswith("counterfactuals/")]
    right = contents(expected_store, expected.id, pictures)
    for job in killing.all_jobs():
        if job.state is not JobState.SUCCEEDED:
            found.unfinished += 1
            found.notes.append(f"{job.id} {job.state}: {job.error}")
            continue
        names = set(store.names(job.id))
        lines = contents(store, job.id, [JOURNAL])[JOURNAL].splitlines()
        images = [timeless(line) for line in lines[1:]]
        found.images += len(images)
        seen = killing.seen[job.id]
        found.lost += sum(i >= len(lines) or line != lines[i] for i, line in enumerate(seen))
        found.duplicated += len(images) - len({image["row"] for image in images})
        found.different += abs(len(lines) - len(wanted))
        changed = [f"line {i + 1}" for i, (a, b) in enumerate(zip(lines, wanted, strict=False)) if _differ(a, b)]
        there = [name for name in pictures if name in names]
        found.missing += len(pictures) - len(there) + sum(name not in names for name in REPORTS)
        changed += [name for name, content in contents(store, job.id, there).items() if content != right[name]]
        found.different += len(changed)
        if changed:
            found.notes.append(f"{job.id} differs in {', '.join(changed[:5])}")
    return found


def _differ(a: bytes, b: bytes) -> bool:
    return timeless(a) != timeless(b)


def undisturbed(configuration: Configuration, images: int, deadline: float) -> Job:
    """The same audit, which nobody kills; it runs in a worker too, with as many threads."""
    table = open_table(configuration)
    executor = LocalExecutor(configuration, table)
    executor.start()
    try:
        job, _ = table.submit("audit", "benchmark", request(images))
        wait_until(lambda: _state(table, job.id).finished, deadline)
    finally:
        executor.stop(10)
    ended = table.get(job.id)
    table.close()
    if ended is None or ended.state is not JobState.SUCCEEDED:
        raise RuntimeError(f"The undisturbed audit did not succeed: {ended and ended.error}")
    return ended


def _state(table: JobTable, id: str) -> JobState:
    job = table.get(id)
    assert job is not None
    return job.state


def crash(
    home: Path,
    *,
    kills: int = KILLS,
    seed: int = SEED,
    spread: float = SPREAD,
    workers: int = 2,
    images: int = IMAGES,
    minutes: float = 30.0,
) -> Found:
    """Kills workers in a new folder `home` and says what it did."""
    deadline = time.monotonic() + 60 * minutes
    write_pictures(home / "pictures")
    # A worker that dies young is started again after a pause that grows; that would only make this run long.
    pause, executor_module.LONGEST_PAUSE = executor_module.LONGEST_PAUSE, 0.5
    start = time.monotonic()
    try:
        disturbed = configured(home, "disturbed", workers)
        killing = Killing(disturbed, images, seed, spread, deadline)
        done = killing.run(kills)
        quiet = configured(home, "quiet", 1)
        expected = undisturbed(quiet, images, deadline)
    finally:
        executor_module.LONGEST_PAUSE = pause
    found = judge(killing, ArtifactStore(disturbed.artifacts_url), expected, ArtifactStore(quiet.artifacts_url))
    found.kills, found.seconds = done, round(time.monotonic() - start, 1)
    killing.table.close()
    return found


def main(argv: list[str] | None = None) -> int:
    """Kills, judges and prints; exit code 1 if something was harmed, or if it took too long."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service_crash", description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=KILLS, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=SEED, help="decides the moments (default: %(default)s)")
    parser.add_argument("--spread", type=float, default=SPREAD, help="most seconds to a kill (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--images", type=int, default=IMAGES, help="of each audit (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=30.0, help="when to give up (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="pfungst-crash-") as home:
        try:
            found = crash(
                Path(home),
                kills=args.kills,
                seed=args.seed,
                spread=args.spread,
                workers=args.workers,
                images=args.images,
                minutes=args.minutes,
            )
        except LateError:
            print(f"not every job had ended after {args.minutes:g} minutes")
            return 1
    print(f"{len(found.kills)} kills, {found.jobs} audits of {found.images} images in {found.seconds:.0f} s")
    for name in ("lost", "duplicated", "different", "missing", "unfinished"):
        print(f"{name:>12}  {getattr(found, name)}")
    for note in found.notes:
        print(f"  {note}")
    if args.json:
        content = asdict(found) | {
            "seed": args.seed,
            "workers": args.workers,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "not_measured": "workers on several machines; PostgreSQL; a power cut",
        }
        write_text(args.json, json.dumps(content, indent=2) + "\n")
    return 0 if found.unharmed else 1


if __name__ == "__main__":
    raise SystemExit(main())
