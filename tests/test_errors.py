# SPDX-License-Identifier: Apache-2.0
import copy
import pickle

import pytest

from sphkv import errors
from sphkv.errors import BudgetError, NativeUnavailableError, SphKVError

CLASSES = [found for found in vars(errors).values() if isinstance(found, type)]


def test_a_budget_error_says_its_bytes_and_survives_a_copy():
    error = BudgetError(300, 200, 1000, "a page")
    for found in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (found.needed, found.free, found.limit, found.missing) == (300, 200, 1000, 100)
        assert str(found).startswith("a page needs 300 bytes")
        assert str(found).endswith("the limit of 1000 bytes by 100 bytes")


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_is_below_the_base_and_tells_what_kind_of_mistake_it_is(kind):
    assert issubclass(kind, SphKVError)
    assert kind is SphKVError or issubclass(kind, (ValueError, RuntimeError))


def test_missing_kernels_are_found_as_a_missing_module_and_as_a_missing_backend():
    with pytest.raises(ImportError):
        raise NativeUnavailableError("not built")
    assert issubclass(NativeUnavailableError, errors.BackendUnavailableError)
