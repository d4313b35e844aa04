"""What every engine, learner, transport and ledger store must do, as suites of pytest for whoever builds one.

A package derives a class of tests from a suite, and overrides its one fixture with the part that is meant::

    # pytest -p penstock.backends.contracts
    from penstock.backends.contracts.engine import EngineContract, EngineSubject

    class TestEcho(EngineContract):
        @pytest.fixture
        def subject(self, tmp_path: Path) -> EngineSubject: ...

As a plug-in this module has pytest explain the suites' assertions; it imports nothing else. The parts that are built in
pass the same suites.
"""

import pytest

pytest.register_assert_rewrite(
    *(f"penstock.backends.contracts.{name}" for name in ("engine", "hearing", "learner", "store", "transport"))
)
