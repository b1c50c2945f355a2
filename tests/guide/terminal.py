"""Somebody at a terminal: types a line into a login shell, answers what asks for a password, reads what comes."""

from __future__ import annotations

import re
import secrets

import pexpect

#: Seconds for a command; the longest installs packages.
PATIENCE = 900


class Terminal:
    """A login shell of root on a machine."""

    def __init__(self, inside: list[str]) -> None:
        """``inside``: the beginning of a command line whose rest runs on the machine."""
        #: By user: the password that is typed at a prompt.
        self.passwords: dict[str, str] = {}
        self._mark = f"<{secrets.token_hex(6)}"
        self._shell = pexpect.spawn(
            inside[0], [*inside[1:], "bash", "--login", "-i"], dimensions=(50, 250), encoding="utf-8", timeout=PATIENCE
        )
        # Typed in two parts, so that the prompt is not taken for what is typed.
        self._shell.sendline(f"stty -echo; unset PROMPT_COMMAND; PS2=; PS1='{self._mark[:4]}''{self._mark[4:]} $?> '")
        self._prompt = re.compile(re.escape(self._mark) + r" (\d+)> ")
        self._shell.expect(self._prompt, timeout=60)
        self.run("bind 'set enable-bracketed-paste off'")

    def run(self, command: str) -> tuple[int, str]:
        """Exit status and output of one line."""
        self._shell.sendline(command)
        output = ""
        while self._shell.expect([self._prompt, re.compile(r"[Pp]assword: $")]) == 1:
            output += self._shell.before + self._shell.after
            self._shell.sendline(self._password(command))
        return int(self._shell.match.group(1)), (output + self._shell.before).replace("\r\n", "\n")

    def _password(self, command: str) -> str:
        """Of the user whom the command is about, its last word."""
        return self.passwords.setdefault(command.split()[-1], secrets.token_urlsafe(9))

    def close(self) -> None:
        self._shell.close(force=True)
