"""The service under load, on loopback: `python -m benchmarks.service_load --json FILE`.

One real server (`bentoml serve` with one audit worker) and three questions, one after the other:

    answers     how long status and health take at the 99th percentile while audits run; each has 100 ms
    throughput  N explanations asked for at once: all answered, and together at least 0.9 times as many a second as one
                call of the engine with the same images makes. Engine and service take turns, in this order and the
                other, and the median of the rounds' ratios counts: what else the machine does meets both
    memory      500 explanations one after the other, some at a time: how much the serving process has grown between
                the median of the second fifth and that of the last; 10 MB are allowed

Both sides have the same number of threads. Numbers of requests and a time limit bound the run. Surrogates are distilled
in a few steps: how a counterfactual looks does not matter here, and the work for one is the same.
"""

import argparse
import io
import json
import math
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import torch
import yaml

from audit.answers import explain_together, target_index
from audit.explain import Explainer, distil_pair
from audit.pictures import to_pil
from engine.writing import write_text
from service.cases import open_classifier_id, surrogate_recipes
from service.client import Client
from service.configuration import Configuration
from service.sources import open_source
from worlds import WORLDS

ROOT = Path(__file__).parents[1]
WORLD = "portraits"
CLASSIFIER = f"{WORLD}/student"
LATENCY_MS = 100.0
THROUGHPUT = 0.9
GROWTH_MB = 10.0
MB = 1e6
AT_A_TIME = 10
PACE_SECONDS = 0.02


@dataclass(frozen=True)
class Target:
    """A promise, and what was measured."""

    name: str
    value: float
    limit: float
    unit: str
    at_least: bool = False

    @property
    def kept(self) -> bool:
        """Whether it was kept; what could not be measured was not."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass(frozen=True)
class Round:
    """One turn of engine and service with the same images."""

    engine_seconds: float
    service_seconds: float
    answered: int


class LateError(Exception):
    """It took longer than the time that was given."""


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(share * len(ordered))) - 1]


def growth(sizes: Sequence[float]) -> float:
    """From the median of the second fifth to that of the last: what the first fifth fills stays filled."""
    fifth = max(1, len(sizes) // 5)
    return median(sizes[-fifth:]) - median(sizes[fifth : 2 * fifth])


# The server ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """A server process, its address and its configuration."""

    process: subprocess.Popen[bytes]
    url: str
    configuration: Configuration


@contextmanager
def serving(home: Path, threads: int, deadline: float) -> Iterator[Server]:
    """`bentoml serve` on a free port of the loopback interface; it is ready, and ended afterwards."""
    file, log = home / "pfungst.yaml", home / "server.log"
    settings = {
        "folder": "data",
        "workers": 1,
        "threads": 1,
        "surrogate_steps": 3,
        "surrogate_pictures": 40,
        "limits": {"queue": 200},
    }
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    environment = os.environ | {
        "PFUNGST_CONFIG": str(file),
        "BENTOML_HOME": str(home / "bentoml"),
        "BENTOML_DO_NOT_TRACK": "True",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "bentoml", "serve", "service:Audit", "--port", str(port)],
            cwd=ROOT,
            env=environment,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        with Client(url) as client:
            while not client.ready():
                if process.poll() is not None:
                    raise RuntimeError(f"the server ended: {log.read_text()[-2000:]}")
                check_time(deadline)
                time.sleep(0.2)
        yield Server(process, url, Configuration.load(file))
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def check_time(deadline: float) -> None:
    """LateError once it is over."""
    if time.monotonic() > deadline:
        raise LateError


def serving_bytes(pid: int) -> int:
    """Resident memory of a server and its children, but for the workers that audit."""
    total = 0
    for one in _family(pid):
        try:
            if b"service.worker" in Path(f"/proc/{one}/cmdline").read_bytes():
                continue
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def _family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = tasks.read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in children:
            found += _family(int(child))
    return found


# The three questions ---------------------------------------------------------------------------------------------


def answer_times(server: Server, n: int, deadline: float) -> dict[str, list[float]]:
    """Milliseconds of status and health, each asked n times while audits run."""
    found: dict[str, list[float]] = {}
    with Client(server.url) as client, httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http:
        policy = {"min_images": 5_000, "max_images": 5_000}  # it does not end by itself
        jobs = [client.submit_audit(CLASSIFIER, policy=policy, k=1) for _ in range(2)]
        while client.job(jobs[0].id).progress.stage != "auditing":
            check_time(deadline)
            time.sleep(0.1)
        addresses = {"status": f"/v1/audits/{jobs[0].id}", "liveness": "/livez", "readiness": "/readyz"}
        for _ in range(n):
            check_time(deadline)
            for name, address in addresses.items():
                start = time.perf_counter()
                answer = http.get(address)
                found.setdefault(name, []).append(1000 * (time.perf_counter() - start))
                if answer.status_code != 200:
                    raise RuntimeError(f"{address} answered {answer.status_code}: {answer.text[:200]}")
            time.sleep(PACE_SECONDS)
        if client.job(jobs[0].id).state != "running":
            raise RuntimeError("the audit had ended before all was asked")
        for job in reversed(jobs):  # the one that waits first, or it would be begun
            client.cancel(job)
        while not client.job(jobs[0].id).ended:
            check_time(deadline)
            time.sleep(0.1)
    return found


class Pictures:
    """Portraits, as the engine takes them and as they are sent."""

    def __init__(self, n: int) -> None:
        self.images = list(WORLDS[WORLD].sample(n, 11).images)
        self.files = []
        for image in self.images:
            stream = io.BytesIO()
            to_pil(image).save(stream, "PNG")
            self.files.append(stream.getvalue())


class Engine:
    """The engine without a service: one call for all pictures."""

    def __init__(self, server: Server, pictures: Pictures, steps: int | None) -> None:
        configuration = server.configuration
        source, classifier = open_source(WORLD), open_classifier_id(CLASSIFIER, configuration)
        guide, evaluator = surrogate_recipes(configuration)
        training = source.pictures(None, configuration.surrogate_pictures or 0)
        pair = distil_pair(classifier, training, configuration.cache_folder, guide=guide, evaluator=evaluator)
        changes: dict[str, Any] = {"k": 1} | ({} if steps is None else {"steps": steps})
        self.explainer = Explainer(source.prior, classifier, pair, source.recipe.changed(**changes))
        self.images = pictures.images
        self.targets = [target_index(self.explainer, image, None) for image in self.images]

    def seconds(self) -> float:
        """How long one call takes."""
        start = time.perf_counter()
        explain_together(self.explainer, self.images, self.targets, list(range(len(self.images))))
        return time.perf_counter() - start


def ask_at_once(url: str, files: Sequence[bytes], steps: int | None, deadline: float) -> tuple[float, int]:
    """(seconds from the first question to the last answer, how many were answered) of questions asked at once."""
    changes = {} if steps is None else {"steps": steps}
    ready = threading.Barrier(len(files) + 1)
    with Client(url, timeout=60) as client:

        def ask(seed: int) -> bool:
            ready.wait()
            left = max(1.0, min(600.0, deadline - time.monotonic()))
            found = client.explain(files[seed], CLASSIFIER, seed=seed, timeout=left, **changes)
            return len(found.counterfactuals) == 1

        with ThreadPoolExecutor(len(files)) as pool:
            asked = [pool.submit(ask, seed) for seed in range(len(files))]
            ready.wait()
            start = time.perf_counter()
            answered = sum(one.exception() is None and one.result() for one in asked)
        return time.perf_counter() - start, answered


def throughput(server: Server, pictures: Pictures, rounds: int, steps: int | None, deadline: float) -> list[Round]:
    """Rounds of engine and service, which take turns to begin."""
    engine = Engine(server, pictures, steps)
    ask_at_once(server.url, pictures.files[:1], steps, deadline)  # opens what stays open
    engine.seconds()
    found = []
    for i in range(rounds):
        check_time(deadline)

        def serve() -> tuple[float, int]:
            return ask_at_once(server.url, pictures.files, steps, deadline)

        if i % 2:
            (service, answered), alone = serve(), engine.seconds()
        else:
            alone, (service, answered) = engine.seconds(), serve()
        found.append(Round(round(alone, 3), round(service, 3), answered))
    return found


def memory(server: Server, pictures: Pictures, requests: int, deadline: float) -> list[float]:
    """Megabytes of the serving process after every few requests."""
    sizes: list[float] = []
    done = 0
    while done < requests:
        n = min(AT_A_TIME, requests - done, len(pictures.files))
        ask_at_once(server.url, pictures.files[:n], 2, deadline)
        done += n
        sizes.append(serving_bytes(server.process.pid) / MB)
        check_time(deadline)
    return sizes


# The run ---------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, say: Callable[[str], None]) -> tuple[list[Target], dict[str, Any]]:
    """Everything that is measured, and the promises it is held against."""
    deadline = time.monotonic() + 60 * args.minutes
    torch.set_num_threads(args.threads)
    pictures = Pictures(args.requests)
    with tempfile.TemporaryDirectory(prefix="pfungst-load-") as home, serving(Path(home), args.threads, deadline) as on:
        say("the server is ready; asking while audits run")
        times = answer_times(on, args.asked, deadline)
        say("asking at once, in turns with the engine")
        rounds = throughput(on, pictures, args.rounds, args.steps, deadline)
        say("asking again and again")
        sizes = memory(on, pictures, args.growth, deadline)
    ratio = median(one.engine_seconds / one.service_seconds for one in rounds)
    answered = min(one.answered for one in rounds)
    targets = [
        Target(f"{name}, 99th percentile", round(percentile(of, 0.99), 1), LATENCY_MS, "ms")
        for name, of in times.items()
    ]
    targets += [
        Target("answered of those asked at once", answered, args.requests, "", at_least=True),
        Target("throughput of service / engine", round(ratio, 3), THROUGHPUT, "", at_least=True),
        Target(f"growth over {args.growth} requests", round(growth(sizes), 1), GROWTH_MB, "MB"),
    ]
    figures = {
        "median_ms": {name: round(median(of), 2) for name, of in times.items()},
        "asked": args.asked,
        "rounds": [asdict(one) for one in rounds],
        "requests": args.requests,
        "memory_mb": [round(size, 1) for size in sizes],
    }
    return targets, figures


def main(argv: list[str] | None = None) -> int:
    """Measures and prints a table; exit code 1 if a target was missed, or if it took too long."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service_load", description=__doc__.split("\n")[0])
    parser.add_argument("--asked", type=int, default=300, help="times that status and health are asked each")
    parser.add_argument(
        "--requests", type=int, default=50, help="explanations asked for at once (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of engine and service (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="guided steps of an explanation (default: the recipe's)")
    parser.add_argument("--growth", type=int, default=500, help="requests of the memory test (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of each side (default: all cores)")
    parser.add_argument("--minutes", type=float, default=30.0, help="when to give up (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    args = parser.parse_args(argv)
    start = time.monotonic()
    try:
        targets, figures = measure(args, lambda text: print(f"{time.monotonic() - start:5.0f} s  {text}", flush=True))
    except LateError:
        print(f"it was not done after {args.minutes:g} minutes")
        return 1
    for one in targets:
        sign, outcome = ("≥" if one.at_least else "≤"), ("kept" if one.kept else "MISSED")
        print(f"{one.name:34} {one.value:9g} {sign} {one.limit:5g} {one.unit:3} {outcome}")
    if args.json:
        content = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, CPU",
            "threads": args.threads,
            "steps": args.steps,
            "not_measured": "a GPU; other machines than this one; more than one server",
            "targets": [asdict(one) | {"kept": one.kept} for one in targets],
            **figures,
        }
        write_text(args.json, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return 0 if all(one.kept for one in targets) else 1


if __name__ == "__main__":
    raise SystemExit(main())
