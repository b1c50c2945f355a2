"""Command lines that get the agent, and their remainder."""

from __future__ import annotations

import pytest

from jupyter_gpu_ckpt.kernel.agent_injection import LAUNCH, rewrite


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("python -m ipykernel_launcher -f F", "python * ipykernel_launcher -f F"),
        ("/e/bin/python3.11 -m ipykernel -f F", "/e/bin/python3.11 * ipykernel -f F"),
        ("python -Xfrozen_modules=off -m ipykernel_launcher", "python -Xfrozen_modules=off * ipykernel_launcher"),
        ("python -X utf8 -W ignore -Werror -m ipykernel", "python -X utf8 -W ignore -Werror * ipykernel"),
        ("python -Bsu -I -m ipykernel", "python -Bsu -I * ipykernel"),
        ("python -Bm ipykernel", "python -B * ipykernel"),
        ("python -mipykernel -m x", "python * ipykernel -m x"),
        ("python -BXdev -m ipykernel", "python -BXdev * ipykernel"),
        ("python -BX dev -m ipykernel", "python -BX dev * ipykernel"),
        ("python --check-hash-based-pycs never -m ipykernel", "python --check-hash-based-pycs never * ipykernel"),
        ("pypy3 -m ipykernel", "pypy3 * ipykernel"),
    ],
)
def test_an_ipykernel_is_rewritten(argv: str, expected: str) -> None:
    assert rewrite(argv.split()) == [str(LAUNCH) if word == "*" else word for word in expected.split()]
    assert LAUNCH.is_file()


def test_arguments_with_blanks_stay_whole() -> None:
    assert rewrite(["/e f/python", "-m", "ipykernel", "-f", "a b"]) == [
        "/e f/python",
        str(LAUNCH),
        "ipykernel",
        "-f",
        "a b",
    ]


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["python"],
        ["python", "-m"],
        ["python", "-X"],
        ["python", "-m", "bash_kernel", "-f", "F"],
        ["python", "-c", "import ipykernel"],
        ["python", "-", "-m", "ipykernel"],
        ["python", "script.py", "-m", "ipykernel_launcher"],
        ["python", "--", "-m", "ipykernel_launcher"],
        ["python", "-x", "-m", "ipykernel"],
        ["python", "-Z", "-m", "ipykernel"],
        ["wrapper.sh", "-m", "ipykernel_launcher", "-f", "F"],
        ["/python/bin/julia", "-m", "ipykernel"],
        ["conda", "run", "python", "-m", "ipykernel_launcher"],
        ["R", "--slave", "-e", "IRkernel::main()"],
    ],
)
def test_anything_else_is_left_alone(argv: list[str]) -> None:
    assert rewrite(argv) is None
