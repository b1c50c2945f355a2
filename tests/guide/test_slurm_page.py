"""The administrators' guide for Slurm, followed literally on an empty machine that is all of the cluster.

As `test_bare_metal` does it.  Nodes that are machines of their own are in `tests/hub/test_slurm.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from reader import REPOSITORY, Reader

PAGE = REPOSITORY / "docs" / "admin" / "slurm.md"
LOGS = """
journalctl --unit=jupyterhub --output=cat --lines=300
journalctl --unit='slurm*' --output=cat --lines=100
tail --lines=100 /home/*/jupyterhub_slurmspawner_*.log
sinfo --Node --long
scontrol show jobs
"""


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_the_page_is_followed_on_a_cluster_that_is_one_machine(empty_machine, tmp_path: Path):
    Reader(PAGE, empty_machine("head"), tmp_path, "head", "node", logs=LOGS).read()
