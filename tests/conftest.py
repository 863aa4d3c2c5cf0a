"""Tests marked ``ranks`` run on processes that live until the session ends.

``ranks(2)`` runs the test on two of them; ``ranks`` alone on as many as the mesh ``axes``, an
argument of the test, asks for. The test's module is loaded there, and its arguments are pickled.
State lives on from one test to the next: what a test changes, it must restore. After a failure the
next test gets new processes.
"""

import math
from contextlib import ExitStack

import pytest

from hyperslab.testing import Team

_stack = ExitStack()


_teams = {}


def _team(num_ranks):
    if num_ranks not in _teams:
        _teams[num_ranks] = _stack.enter_context(Team(num_ranks, timeout_seconds=60))
    return _teams[num_ranks]


def pytest_configure(config):
    config.addinivalue_line("markers", "ranks(num): runs on live processes, see tests/conftest.py")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    __tracebackhide__ = True
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    num_ranks = marker.args[0] if marker.args else math.prod(arguments["axes"].values())
    _team(num_ranks).run(pyfuncitem.obj, **arguments)
    return True


def pytest_sessionfinish():
    _stack.close()


@pytest.fixture
def no_live_processes():
    """Ends them, for a test that kills the server they come from; later tests get new ones."""
    for team in _teams.values():
        team.close()


@pytest.fixture(scope="session")
def team_of():
    """The live processes: ``team_of(4).run(body, ...)`` runs ``body`` on four of them."""
    return _team
