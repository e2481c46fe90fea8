"""Fixtures of the training tests."""

import resource

import pytest


@pytest.fixture
def full_disk():
    """A function that limits the size of files, as a disk that is full would; lifted after the test."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
