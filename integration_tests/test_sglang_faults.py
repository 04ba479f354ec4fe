"""Faults in a real SGLang server: damaged files, poison, a planner and a kernel that fail."""

import pytest

from integration_tests.common.faults import check_faults

pytestmark = pytest.mark.rare


def test_faults_end_in_right_answers(tmp_path):
    check_faults("sglang", tmp_path)
