"""The files of a fingerprint that are not those the kernel had open or mapped, compared for `match`."""

from __future__ import annotations

import shlex
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..units import size
from . import databases
from .facts import Facts
from .mismatch import Mismatch

#: The names of ``stat(2)`` for the kinds of files.
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_PUT_BACK = "Put it back."
OR_RESTART = "If that cannot be done, restart the kernel, which loses its variables."
CODE = f"The kernel runs this program code: put back the version that it was (reinstall it). {OR_RESTART}"


@dataclass(frozen=True)
class Judge:
    """``accept``: changed data files are accepted.  ``here``: on the image's own machine.  ``image``: its id."""

    accept: bool
    here: bool
    image: str

    @property
    def how_to_accept(self) -> str:
        return how_to_accept(self.image)


def how_to_accept(image: str) -> str:
    """Return, for advice, the command by which the changed files of an image are accepted."""
    return f"`jupyter gpu-ckpt match {image} --accept-changed-files`"


def changed_files(wanted: Mapping[str, Facts], found: Mapping[str, Facts | None], judge: Judge) -> Iterator[Mismatch]:
    """Yield every difference of the files in ``wanted`` from those in ``found``."""
    in_wal_mode = [path for path, was in wanted.items() if was.get("wal")]
    logs_and_indexes = {each for path in in_wal_mode for each in databases.members(path)[1:]}
    for path, was in wanted.items():
        if path in in_wal_mode:
            yield from _database(path, wanted, found, judge)
        elif path not in logs_and_indexes:
            yield from _file(path, was, found[path], judge)


def _database(
    path: str, wanted: Mapping[str, Facts], found: Mapping[str, Facts | None], judge: Judge
) -> Iterator[Mismatch]:
    """Compare a database in WAL mode with its log and its index: they count as one.

    Others may have removed log and index, which are made again (`sqlite_wal`).
    """
    was, now, strict = wanted[path], found[path], replace(judge, accept=False)
    names = databases.members(path)
    compared = [each for name in names for each in _file(name, wanted[name], found[name], strict)]
    if not any(each.hard for each in compared):
        yield from compared
        return
    others = [found[name] for name in names[1:]]
    in_place = now is not None and all(each is None or _kind(each) == stat.S_IFREG for each in (now, *others))
    if not in_place:
        yield from (each for name in names for each in _file(name, wanted[name], found[name], judge))
        return
    assert now is not None
    if was["transaction"] == "write":
        advice, hard = _WOULD_DAMAGE, True
    elif now.get("log_lost") and (now.get("same") or now["wal"]):
        advice, hard = _ROWS_LOST.format(names[1], judge.how_to_accept), True
        if judge.accept:
            advice, hard = _CONTINUES, False
    elif was["transaction"] == "read" and (now.get("same") or now["wal"]):
        advice, hard = f"{_IN_A_QUERY} Or accept that: {judge.how_to_accept}.", True
        if judge.accept:
            advice, hard = _CONTINUES, False
    elif not (now.get("same") or now["wal"]):
        to_wal = shlex.join(["sqlite3", path, "PRAGMA journal_mode = WAL"])
        advice = f"The kernel has it open in WAL mode, and cannot use another mode. To change it back: `{to_wal}`."
        hard = True
    elif now.get("same") or (_is_same_database(was, now) and was["wal"] == now["wal"]):
        advice, hard = _NOTICED, False
    else:
        advice, hard = _judged(was, now, False, judge)
    for each in compared:
        yield replace(each, field="file_changed", advice=advice, hard=hard) if each.hard else each


def _file(path: str, was: Facts, now: Facts | None, judge: Judge) -> Iterator[Mismatch]:
    if now is None:
        before = f"{size(was['size'])}, the kernel {'has it open' if was['open'] else 'uses it'}"
        yield Mismatch("file_missing", path, before, "no file", _PUT_BACK, True, path)
    elif _kind(was) and _kind(now) != _kind(was):
        before, after = (_KINDS.get(_kind(file), "another kind of file") for file in (was, now))
        yield Mismatch("file_changed", path, before, after, _PUT_BACK, True, path)
    elif now.get("same"):
        return
    elif was["build_id"] and now["build_id"] != was["build_id"]:
        before, after = f"build-id {was['build_id'][:12]}", f"build-id {now['build_id'][:12]}"
        field, advice = "build", "The kernel runs this program code; install the same version as on the other node."
        if judge.here:  # installed or built anew
            field, advice = "file_changed", CODE
        yield Mismatch(field, path, before, after if now["build_id"] else "no build-id", advice, True, path)
    else:
        yield from _other_rights(path, was, now, judge)
        if stat.S_ISDIR(now["mode"]):
            yield from _replaced_directory(path, was, now, judge)
        elif now["size"] == was["size"]:
            yield from _other_content(path, was, now, judge)
        else:
            yield from _other_size(path, was, now, judge)


def _kind(file: Facts) -> int:
    return stat.S_IFMT(file["mode"] or 0)


def _replaced_directory(path: str, was: Facts, now: Facts, judge: Judge) -> Iterator[Mismatch]:
    # A device with another number may be the same one, mounted again.
    if judge.here and "inode" in was and now["device"] == was["device"] and now["inode"] != was["inode"]:
        advice = f"It was replaced: put the old one back. Or accept it as it is: {judge.how_to_accept}."
        yield Mismatch("file_changed", path, "the directory there was", "another one", advice, not judge.accept, path)


_DELETED = "The kernel has it open under a name that was deleted; put it back as it was."
_CONTINUES = "The kernel continues with it as it is now."
_NOTICED = "SQLite notices what others wrote into its database."
_ROWS_LOST = (
    "What the kernel wrote last was in {0}, and is not in the database: put that file back as it was, with the "
    "database. Or continue without what is lost: {1}."
)
_IN_A_QUERY = (
    "The kernel is in a transaction that reads it, whose queries may fail now, or return what was there before and "
    "after: put it back as it was."
)
_WOULD_DAMAGE = (
    "The kernel is in a transaction that writes to it, and would damage what others wrote since. Put it back as it was."
)
# With a rollback journal it looks at the change counter only when it begins (pager.c: sqlite3PagerSharedLock), and then
# writes old pages over new ones; in WAL mode it may not write (SQLITE_BUSY_SNAPSHOT).
_WOULD_UNDO = (
    "The kernel is in a transaction that reads it, and would undo what others wrote since as soon as it writes. Put it "
    "back as it was."
)


def _other_content(path: str, was: Facts, now: Facts, judge: Judge) -> Iterator[Mismatch]:
    """Compare files of the same kind and size by their hashes, or where there is none, by their identities."""
    if not was["checked"] or "inode" not in was:
        return  # only appended to, or without a noted identity
    unchanged = not was.get("unstamped") and (was["inode"], was["mtime"]) == (now["inode"], now["mtime"])
    if now["recorded"] and now["blake3"]:
        if now["recorded"] == now["blake3"]:
            return
        before, after = f"content {now['recorded'][:12]}", f"content {now['blake3'][:12]}"
    elif was["build_id"]:
        return
    elif was.get("unstamped") and was["device"] == now["device"]:
        before, after = "as it was", "not known: a change of it may leave no trace, and there is no hash of it"
    elif unchanged:
        if was["ctime"] != now["ctime"] and not was.get("made") and not _is_free_database(was, now):
            yield _unproven(path, was, now, judge)
        return
    elif not judge.here or was["device"] != now["device"]:
        return  # a copy, or the same file on a device that was mounted again: nothing but the size can be compared
    elif was["inode"] != now["inode"]:
        before, after = "the file there was", "another one"
    else:
        before, after = "as it was", "written to since"
    yield Mismatch("file_changed", path, before, after, *_judged(was, now, False, judge), path)


def _unproven(path: str, was: Facts, now: Facts, judge: Judge) -> Mismatch:
    """Return the mismatch of a file of which nothing but the time of its last change of any kind (ctime) differs.

    Rights, names and attributes change that time, and so does a program that writes to the file and puts its time of
    modification back.  Who knows which of them it was may say so, of program code, too.
    """
    why = "it cannot be read" if now["recorded"] else "the image has no hash of it, as it was new and large"
    advice = (
        f"Another name or other rights count as a change, too, but its content cannot be compared: {why}. "
        f"If you know that its content is the same, accept it: {judge.how_to_accept}."
    )
    advice, hard = (_CONTINUES, False) if judge.accept else (advice, True)
    return Mismatch("file_changed", path, "unchanged since the checkpoint", "changed (ctime)", advice, hard, path)


def _judged(was: Facts, now: Facts, mapped: bool, judge: Judge) -> tuple[str, bool]:
    """Return the advice about a changed file, and whether it is hard.  ``mapped``: memory depends on its size."""
    if was.get("made"):
        return _DELETED, True
    if was.get("code"):
        return CODE, True
    if was.get("transaction") == "write":
        return _WOULD_DAMAGE, True
    if was.get("transaction") == "read" and not was.get("wal"):
        return _WOULD_UNDO, True
    if _is_free_database(was, now):
        return _NOTICED, False
    if mapped:
        return "The kernel has it mapped into its memory; put it back as it was.", True
    if judge.accept:
        return _CONTINUES, False
    return f"Put it back. Or accept it as it is: {judge.how_to_accept}.", True


def _is_free_database(was: Facts, now: Facts) -> bool:
    """Return whether it is a database that the kernel has no lock on.

    Its connection takes nothing for granted: each transaction begins with the change counter, and if that has changed,
    pages and mapping of the file are dropped (pager.c: sqlite3PagerSharedLock).
    """
    return not was.get("locked") and _is_same_database(was, now)


def _is_same_database(was: Facts, now: Facts) -> bool:
    """Return whether a database is the same file as before, whatever is in it now."""
    born = was.get("database_born")
    return bool(born) and (was.get("inode"), born) == (now["inode"], now.get("database_born"))


def _other_rights(path: str, was: Facts, now: Facts, judge: Judge) -> Iterator[Mismatch]:
    """Compare permissions: other ones are no other content, but the kernel must be able to open the file again."""
    if now.get("denied"):
        yield Mismatch("file_changed", path, "a file that this user may open", "another user's", _PUT_BACK, True, path)
        return
    if was["mode"] is None or now["mode"] == was["mode"]:
        return
    before, after = f"mode {was['mode']:o}", f"mode {now['mode']:o}"
    advice = f"chmod {was['mode'] & 0o7777:o} {shlex.quote(path)}"
    if now["usable"]:
        yield Mismatch("file_changed", path, before, after, _CONTINUES, False, path)
    else:
        yield Mismatch("file_changed", path, before, after, advice, not judge.accept, path)


def _other_size(path: str, was: Facts, now: Facts, judge: Judge) -> Iterator[Mismatch]:
    if not (was["checked"] or was["open"]):
        return
    # Beyond the end of a mapped file there is no memory: an access ends the process (SIGBUS).
    mapped = bool(was["build_id"] or (was["mapped"] and now["size"] < was["size"]))
    advice, hard = _judged(was, now, mapped, judge)
    if not was["checked"]:
        advice, hard = "The kernel only appends to it, and continues at its end.", False
    yield Mismatch("file_changed", path, f"{was['size']} bytes", f"{now['size']} bytes", advice, hard, path)
