"""`bentoml build` offline, and what it ships."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.service.http.conftest import ROOT, end, environment, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_bento_is_built_offline_and_serves(tmp_path: Path) -> None:
    (tmp_path / "pfungst.yaml").write_text("folder: data\nworkers: 0\n")
    # Any proxy that cannot be reached stands for a network that is not there.
    nowhere = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
    # BentoML looks for uv and would fetch it; with exact versions it has nothing to ask it, so this one only fails.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "uv").write_text("#!/bin/sh\nexit 97\n")
    (tmp_path / "bin" / "uv").chmod(0o755)
    path = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    built = subprocess.run(
        [sys.executable, "-m", "bentoml", "build", "--output", "tag", "."],
        cwd=ROOT,
        env=environment(tmp_path) | nowhere | path,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    tag = built.stdout.strip().splitlines()[-1].removeprefix("__tag__:")
    folder = tmp_path / "bentoml" / "bentos" / tag.replace(":", "/")
    facts = yaml.safe_load((folder / "bento.yaml").read_text())
    assert facts["service"].endswith(":Audit")
    shipped = folder / "src"
    for name in ("engine", "audit", "service/http/routes", "worlds/weights/portraits/prior", "worlds/recipes"):
        assert (shipped / name).is_dir(), name
    assert not (shipped / "worlds" / ".training").exists() and not (shipped / "tests").exists()
    served = serve(tmp_path, tag, cwd=tmp_path)
    try:
        assert served.client.get("/v1/priors").json()["priors"][0]["ready"]
        assert served.client.get("/v1/openapi.json").json()["openapi"].startswith("3.")
    finally:
        assert end(served) < 10
