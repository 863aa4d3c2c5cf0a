"""What the files around the package say of it is true."""

import os
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import hyperslab

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md")


def read(name):
    return (ROOT / name).read_text()


@pytest.fixture(scope="module")
def project():
    return tomllib.loads(read("pyproject.toml"))


def test_the_version_is_written_in_the_package_alone(project):
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "hyperslab.__version__"}
    assert "version:" not in re.sub("cff-version:", "", read("CITATION.cff"))
    assert version("hyperslab") == hyperslab.__version__, "install it again: pip install -e ."


def test_the_newest_release_of_the_changelog_is_this_version():
    releases = re.findall(r"^## (\d\S*)", read("CHANGELOG.md"), re.M)
    assert releases[0] == hyperslab.__version__


def test_the_constraints_pin_torch_alone_and_as_the_package_allows(project):
    lines = [line for line in read("constraints.txt").splitlines() if not line.startswith("#")]
    (pinned,) = map(Requirement, lines)
    (allowed,) = (
        needed
        for needed in map(Requirement, project["project"]["dependencies"])
        if needed.name == "torch"
    )
    assert pinned.name == "torch"
    (release,) = pinned.specifier
    assert release.operator == "=="
    assert release.version in allowed.specifier
    assert f"torch {release.version}" in read("README.md")


def test_all_that_goes_into_the_sdist_is_there():
    rules = [line.split() for line in read("MANIFEST.in").splitlines()]
    names = [name for rule, *names in rules if rule in ("include", "graft") for name in names]
    assert names
    assert not [name for name in names if not (ROOT / name).exists()]


def make_targets(page):
    return set(re.findall(r"(?:`|\$ )make ([a-z-]+)", read(page)))


@pytest.mark.parametrize("page", PAGES)
def test_the_make_targets_of_a_page_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.M))
    assert make_targets(page)
    assert not make_targets(page) - targets


def test_the_readme_names_every_make_target():
    (phony,) = re.findall(r"^\.PHONY: (.+)", read("Makefile"), re.M)
    assert make_targets("README.md") == {*phony.split()} - {"clean"}


def test_the_readme_names_every_extra_for_users(project):
    extras = {*project["project"]["optional-dependencies"]} - {"test", "dev"}
    (line,) = re.findall(r"^Extras: .*?\.$", read("README.md"), re.M | re.S)
    assert set(re.findall(r"`(\w+)` \(", line.replace("\n", " "))) == extras
    (used,) = re.findall(r"'\.\[([\w,]+)\]'", line)
    assert {*used.split(",")} <= extras


def test_hosted_ci_runs_all_that_must_hold_with_the_oldest_python(project):
    workflow = read(".github/workflows/ci.yml")
    assert re.search(r"- run: \.ci/run$", workflow, re.M)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    (python,) = re.findall(r'python-version: "(.+)"', workflow)
    assert project["project"]["requires-python"] == f">={python}"
