"""Tests marked ``ranks`` run on processes that live until the session ends.

``ranks(2)`` runs the test on two of them; ``ranks`` alone on as many as the mesh ``axes``, an
argument of the test, asks for. The test's module is loaded there, and its arguments are pickled.
State lives on from one test to the next: what a test changes, it must restore. After a failure the
next test gets new processes.
"""

import functools
import math
from contextlib import ExitStack, suppress

import pytest

from hyperslab.testing import Team
from hyperslab.testing.client import ServerError

_stack = ExitStack()


@functools.cache
def _team(num_ranks):
    return _stack.enter_context(Team(num_ranks, timeout_seconds=60))


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
    try:
        _team(num_ranks).run(pyfuncitem.obj, **arguments)
    except ServerError:  # a test of the server killed it; the next run is on new processes
        _team(num_ranks).run(pyfuncitem.obj, **arguments)
    return True


def pytest_sessionfinish():
    with suppress(ServerError):  # a test of the server kills it, and the processes with it
        _stack.close()


@pytest.fixture(scope="session")
def team_of():
    """The live processes: ``team_of(4).run(body, ...)`` runs ``body`` on four of them."""
    return _team
