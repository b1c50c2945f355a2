"""Databases of SQLite in a fingerprint: noted at a checkpoint, and held for a restore.

The entry of an open database has ``database_born``: when it was made, in ns, 0 if unknown; ``transaction``: whether the
kernel is in one, ``none``, ``read`` or ``write``.  In WAL mode it has ``wal``: the size of a page; and ``boot``: the
boot in which its index was used; and ``uncopied`` if its log has pages that the database lacks (`sqlite_wal`).  Log
and index are entries of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from .. import procfs
from ..process import sqlite_wal
from . import facts as node
from .facts import Facts


def note(files: Mapping[str, dict[str, Any]], locks: Mapping[str, Collection[sqlite_wal.Lock]]) -> None:
    """Add what is known of databases to the entries of a fingerprint's ``files``; ``locks``: POSIX locks by path."""
    for path, file in files.items():
        if not file["open"] or (database := node.database(path)) is None:
            continue
        own = locks.get(path, ())
        file |= {"database_born": database.born, "transaction": _transaction(own)}
        log, index = (files.get(path + suffix, {}) for suffix in (sqlite_wal.LOG, sqlite_wal.INDEX))
        in_wal_mode = database.wal_page_size and log.get("open") and index.get("mapped") and index.get("writes")
        if in_wal_mode and (known := sqlite_wal.transaction(own, locks.get(path + sqlite_wal.INDEX, ()))):
            file |= {"transaction": known, "wal": database.wal_page_size, "boot": procfs.boot_id()}
            with contextlib.suppress(OSError):  # it was removed just now, which `match` notices
                file["uncopied"] = sqlite_wal.uncopied(path, database.wal_page_size)


def _transaction(locks: Collection[sqlite_wal.Lock]) -> str:
    """Return whether the kernel is in a transaction on a database with a rollback journal (its lockingv3.html)."""
    if any(kind != fcntl.F_RDLCK for kind, _, _ in locks):
        return "write"
    return "read" if locks else "none"


def is_one(file: Facts) -> bool:
    """Return whether an entry of a fingerprint is that of a database."""
    return "transaction" in file or bool(file.get("database_born"))


def is_log_lost(path: str, was: Facts) -> bool:
    """Return whether pages are gone that the log of the database had, whose entry ``was`` is, and nothing else."""
    with contextlib.suppress(OSError):
        return bool(was.get("uncopied")) and sqlite_wal.is_lost(path, was["wal"], was["uncopied"])
    return False


def present(path: str) -> dict[str, Any]:
    """Return what is to be compared of a database: ``database_born`` and ``wal``, 0 if there is none."""
    found = node.database(path) or node.Database(0, 0)
    return {"database_born": found.born, "wal": found.wal_page_size}


def members(path: str) -> tuple[str, str, str]:
    """Return the paths of a database in WAL mode, its log and its index."""
    return path, path + sqlite_wal.LOG, path + sqlite_wal.INDEX


def to_lock(files: Mapping[str, Facts]) -> Iterator[tuple[dict[str, Any], tuple[str, str, str]]]:
    """Yield arguments for `sqlite_wal.lock_database`, and the paths of each database in WAL mode.

    Of a kernel without a transaction log and index are made anew if a file is not the very same; and after a boot, for
    what was last written to them may not have reached the disk.  Else they are only if one is not there: `match` has
    refused that, or the user accepts it.
    """
    for path, file in files.items():
        if not file.get("wal"):
            continue
        paths = members(path)
        now = {each: node.file_facts(each) for each in paths}
        same = all(facts is not None and node.same_file(files[each], facts) for each, facts in now.items())
        arguments: dict[str, Any] = {"path": path, "index_bytes": files[path + sqlite_wal.INDEX]["size"]}
        if file["transaction"] == "none":
            arguments["anew"] = not (same and file["boot"] == procfs.boot_id())
        else:
            arguments["anew"] = not all(now.values())
        if same and not arguments["anew"]:
            compared = ("inode", "size", "mtime", "ctime")
            arguments["unchanged"] = {each: [files[each][name] for name in compared] for each in paths}
        yield arguments, paths
