"""The examples are parsed, and every command, option, input and setting that they name exists."""

import argparse
import importlib
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from audit.policy import Policy

EXAMPLES = Path(__file__).parent.parent / "examples"
ACTION = EXAMPLES / "github" / "action.yml"
WORKFLOW = EXAMPLES / "github" / "workflow.yml"
GITLAB = EXAMPLES / "gitlab" / ".gitlab-ci.yml"


def read(file: Path) -> dict[Any, Any]:
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def scripts() -> dict[str, str]:
    """Every shell script of the examples, by where it stands."""
    found = {}
    for step in read(ACTION)["runs"]["steps"]:
        if "run" in step:
            found[f"action.yml: {step['name']}"] = step["run"]
    for step in read(WORKFLOW)["jobs"]["audit"]["steps"]:
        if "run" in step:
            found[f"workflow.yml: {step['name']}"] = step["run"]
    for name in ("audit", "repair"):
        found[f".gitlab-ci.yml: {name}"] = "\n".join(read(GITLAB)[name]["script"])
    return found


def parser_of(command: str) -> argparse.ArgumentParser:
    root = argparse.ArgumentParser()
    subparsers = root.add_subparsers()
    importlib.import_module(f"service.commands.{command}").add(subparsers)
    parser: argparse.ArgumentParser = subparsers.choices[command]
    return parser


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {name for action in parser._actions for name in action.option_strings}


@pytest.mark.parametrize("where", scripts())
def test_named_commands_and_options_exist(where: str) -> None:
    script = scripts()[where]
    commands = re.findall(r"\bpfungst +([a-z]+)", script)
    own = options_of(parser_of(commands[0])) if commands else set()
    for command in commands:
        assert options_of(parser_of(command)) == own, "one command per script, so that options can be told apart"
    for line in script.splitlines():
        if "pip install" not in line:
            assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", line)) <= own


def test_every_example_uses_the_command() -> None:
    text = "\n".join(scripts().values())
    assert set(re.findall(r"\bpfungst +([a-z]+)", text)) == {"audit", "cfkd"}


@pytest.mark.parametrize("where", [name for name in scripts() if name.startswith((".gitlab", "workflow"))])
def test_whole_commands_are_taken_by_the_parser(where: str) -> None:
    words = shlex.split(scripts()[where])
    assert words[0] == "pfungst"
    parser_of(words[1]).parse_args(words[2:])


@pytest.mark.parametrize("where", scripts())
def test_scripts_are_whole_bash(where: str) -> None:
    done = subprocess.run(["bash", "-n"], input=scripts()[where], text=True, capture_output=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_action_s_inputs_reach_its_script_only_as_variables() -> None:
    action = read(ACTION)
    for step in action["runs"]["steps"]:
        assert "${{" not in step.get("run", "")
    used = set(re.findall(r"inputs\.([a-z-]+)", ACTION.read_text()))
    assert used == action["inputs"].keys()


def test_the_workflow_names_inputs_and_outputs_of_the_action() -> None:
    action, workflow = read(ACTION), read(WORKFLOW)
    step = next(step for step in workflow["jobs"]["audit"]["steps"] if step.get("id") == "audit")
    assert "/examples/github@" in step["uses"]
    required = {name for name, entry in action["inputs"].items() if entry.get("required")}
    assert required <= step["with"].keys() <= action["inputs"].keys()
    assert set(re.findall(r"steps\.audit\.outputs\.([a-z-]+)", WORKFLOW.read_text())) <= action["outputs"].keys()


@pytest.mark.parametrize(
    ("answer", "allowed", "code", "verdict"),
    [
        (0, "false", 0, "PASS"),
        (1, "true", 1, "FAIL"),
        (2, "true", 2, ""),
        (3, "false", 3, "INCONCLUSIVE"),
        (3, "true", 0, "INCONCLUSIVE"),
    ],
)
def test_the_action_s_script_hands_the_exit_code_on(
    tmp_path: Path, answer: int, allowed: str, code: int, verdict: str
) -> None:
    """The script as it stands, with a stand-in for `pfungst` that notes its arguments."""
    stand_in = tmp_path / "bin" / "pfungst"
    stand_in.parent.mkdir()
    stand_in.write_text(
        f'#!/bin/bash\nprintf "%s\\n" "$@" > arguments\nmkdir -p o\necho "## said" > o/summary.md\nexit {answer}\n'
    )
    stand_in.chmod(0o755)
    script = next(text for name, text in scripts().items() if name == "action.yml: Audit")
    given = {"CLASSIFIER": "my 'model'; rm -rf x", "DATA": "d", "PRIOR": "auto", "OUT": "o", "SPLIT": "test"}
    environment = {
        "PATH": f"{stand_in.parent}:/usr/bin:/bin",
        "POLICY": "",
        "TEACHER": "",
        "ALLOW_INCONCLUSIVE": allowed,
        "GITHUB_OUTPUT": "output",
        "GITHUB_STEP_SUMMARY": "summary",
        **given,
    }
    # As GitHub runs `shell: bash`.
    command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, timeout=30)
    assert done.returncode == code
    assert (tmp_path / "output").read_text() == f"verdict={verdict}\nexit-code={answer}\n"
    assert (tmp_path / "summary").read_text() == "## said\n"
    words = (tmp_path / "arguments").read_text().splitlines()
    assert words[0] == "audit"
    found = parser_of("audit").parse_args(words[1:])
    assert (found.classifier, str(found.data), found.split) == (given["CLASSIFIER"], "d", "test")


def test_gitlab_lets_only_the_inconclusive_pass_and_shows_the_test_report() -> None:
    audit = read(GITLAB)["audit"]
    assert audit["allow_failure"] == {"exit_codes": [3]}
    out = re.search(r"--out (\S+)", scripts()[".gitlab-ci.yml: audit"])
    assert out
    assert audit["artifacts"]["reports"]["junit"] == f"{out[1]}/junit.xml"


def test_the_policy_is_one_and_names_every_setting() -> None:
    file = EXAMPLES / "policy.yaml"
    policy = Policy.load(file)
    assert read(file).keys() == Policy.model_fields.keys()
    assert policy.accepted[0].direction == "dark → blond"
