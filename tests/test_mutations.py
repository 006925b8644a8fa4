"""Every mutation of tests/mutate.py still applies: a refactoring that moves its text is noticed at once."""

import pytest

from tests import mutate


@pytest.mark.parametrize("mutation", mutate.MUTATIONS, ids=lambda mutation: mutation.what)
def test_it_applies(mutation):
    assert not mutate.misplaced([mutation]), "write it anew in tests/mutate.py"
    assert mutation.wrong != mutation.right


def test_no_two_have_one_name():
    names = [mutation.what for mutation in mutate.MUTATIONS]
    assert len(set(names)) == len(names)
