"""Plain files, directories, and what lies between a file and the process: positions, locks, names that went."""

from __future__ import annotations

import contextlib
import ctypes
import dbm.dumb
import fcntl
import gzip
import io
import json
import logging
import logging.handlers
import mmap
import os
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from jupyter_gpu_ckpt import procfs

from . import IMPOSSIBLE, documented, kind, refused
from .asking import error_of, eventually, fdinfo, flags, libc, place


@kind("a file read halfway")
def read_halfway():
    path = place("file") / "lines"
    path.write_text("".join(f"line {n}\n" for n in range(5000)))
    file = open(path)
    for _ in range(100):
        file.readline()
    position = file.tell()

    def show():
        file.seek(position)
        return file.readline(), position, flags(file.fileno())

    return show


@kind("a file with unflushed text in Python's buffer")
def unflushed():
    path = place("file") / "log"
    file = open(path, "wb")
    file.write(b"begun ")
    return lambda: (path.read_text(), file.tell(), file.closed)


@kind("a file opened to append")
def append():
    path = place("file") / "log"
    path.write_text("a")
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def show():
        os.write(fd, b"x")
        text = path.read_text()
        os.truncate(path, 1)
        return text, flags(fd)

    return show


@kind("a file with odd flags (O_SYNC, O_NOATIME, O_NONBLOCK)")
def odd_flags():
    path = place("file") / "odd"
    path.write_text("odd")
    fds = [os.open(path, os.O_RDWR | flag) for flag in (os.O_SYNC, os.O_DSYNC, os.O_NOATIME, os.O_NONBLOCK)]
    return lambda: [flags(fd) for fd in fds]


@kind("a file opened with direct I/O (O_DIRECT)")
def direct():
    path = place("file") / "direct"
    path.write_bytes(b"d" * 8192)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    page = mmap.mmap(-1, 4096)
    return lambda: (os.preadv(fd, [page], 4096), bytes(page[:3]).decode(), flags(fd))


@kind("two descriptors that share a file offset, and one that does not")
def shared_position():
    path = place("file") / "shared"
    path.write_text("0123456789")
    one = os.open(path, os.O_RDONLY)
    two, other = os.dup(one), os.open(path, os.O_RDONLY)
    os.read(one, 3)

    def show():
        os.lseek(two, 5, os.SEEK_SET)
        seen = os.lseek(one, 0, os.SEEK_CUR), os.lseek(other, 0, os.SEEK_CUR)
        os.lseek(one, 3, os.SEEK_SET)
        return seen

    return show


@kind("a file that was deleted while it is open")
def deleted():
    path = place("file") / "gone"
    file = open(path, "w+")
    file.write("still here")
    file.flush()
    path.unlink()
    return lambda: (os.pread(file.fileno(), 100, 0).decode(), os.fstat(file.fileno()).st_nlink, file.tell())


@kind("a deleted file whose name has 235 bytes")
def deleted_long_name():
    path = place("file") / ("n" * 235)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(fd, b"still here")
    path.unlink()
    return lambda: (os.pread(fd, 100, 0).decode(), os.readlink(f"/proc/self/fd/{fd}"))


@kind(
    "a deleted file whose name has 245 bytes",
    refused("FILE_UNSUPPORTED", "name has 245 bytes"),
    alone="is refused",
    advice="Close it, or give such files names of at most 235 bytes.",
)
def deleted_too_long_name():
    path = place("file") / ("n" * 245)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    path.unlink()
    return lambda: os.fstat(fd).st_nlink, lambda: os.close(fd)


@kind("a large deleted file with holes")
def deleted_sparse():
    path = place("file") / "gone"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"end", 50 << 20)
    path.unlink()
    return lambda: (os.fstat(fd).st_size, os.fstat(fd).st_blocks < 1000, os.pread(fd, 3, 50 << 20).decode())


@kind("a deleted file with another hard link")
def deleted_other_name():
    directory = place("file")
    (directory / "one").write_text("two names")
    os.link(directory / "one", directory / "two")
    fd = os.open(directory / "one", os.O_RDONLY)
    (directory / "one").unlink()
    inode = (directory / "two").stat().st_ino
    return lambda: (os.pread(fd, 100, 0).decode(), os.fstat(fd).st_ino == inode, os.fstat(fd).st_nlink)


@kind("a file renamed while it is open")
def renamed():
    directory = place("file")
    (directory / "before").write_text("renamed")
    fd = os.open(directory / "before", os.O_RDWR)
    (directory / "before").rename(directory / "after")

    def show():
        os.pwrite(fd, b"R", 0)
        return (directory / "after").read_text(), Path(os.readlink(f"/proc/self/fd/{fd}")).name

    return show


@kind("a file whose path another file has taken")
def replaced():
    directory = place("file")
    (directory / "name").write_text("the first")
    fd = os.open(directory / "name", os.O_RDONLY)
    (directory / "new").write_text("the second")
    (directory / "new").rename(directory / "name")
    return lambda: (os.pread(fd, 100, 0).decode(), (directory / "name").read_text())


@kind("a file opened through a symbolic link")
def through_symlink():
    directory = place("file")
    (directory / "real").write_text("real")
    (directory / "link").symlink_to("real")
    fd = os.open(directory / "link", os.O_RDONLY)
    return lambda: (os.pread(fd, 9, 0).decode(), Path(os.readlink(f"/proc/self/fd/{fd}")).name)


@kind("a deleted file in a deleted directory")
def deleted_with_directory():
    directory = place("file")
    fd = os.open(directory / "inner", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"homeless")
    shutil.rmtree(directory)
    return lambda: os.pread(fd, 100, 0).decode(), lambda: os.close(fd)


@kind("an unnamed temporary file (O_TMPFILE)")
def tmpfile():
    fd = os.open(place("file"), os.O_TMPFILE | os.O_RDWR, 0o600)
    os.write(fd, b"nameless")
    return lambda: (os.pread(fd, 100, 0).decode(), os.fstat(fd).st_nlink)


@kind(
    "an unnamed temporary file that gets its name later (O_TMPFILE, linkat)",
    documented("gets no name any more"),
    advice="Write to a file with a name, and rename it.",
)
def tmpfile_named_later():
    directory, names = place("file"), iter(range(100))
    fds = [os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600) for _ in range(9)]

    def name_one():
        at_fdcwd, at_symlink_follow = -100, 0x400
        path = str(directory / f"named-{next(names)}").encode()
        libc("linkat", at_fdcwd, b"/proc/self/fd/%d" % fds.pop(), at_fdcwd, path, at_symlink_follow)

    return lambda: error_of(name_one)


@kind("tempfile.TemporaryFile, NamedTemporaryFile, SpooledTemporaryFile")
def temporary_files():
    files = [tempfile.TemporaryFile(), tempfile.NamedTemporaryFile(dir=place("t")), tempfile.SpooledTemporaryFile(99)]
    for file in files:
        file.write(b"temporary")

    def show():
        texts = []
        for file in files:
            file.seek(0)
            texts.append(file.read().decode())
        return texts, Path(files[1].name).exists()

    return show, lambda: [file.close() for file in files]


@kind("tempfile.TemporaryDirectory")
def temporary_directory():
    directory = tempfile.TemporaryDirectory(dir=place("t"))
    Path(directory.name, "inside").write_text("kept")
    return lambda: Path(directory.name, "inside").read_text()


@kind("a directory, open", documented("O_DIRECTORY"))
def directory_open():
    directory = place("directory")
    (directory / "a").touch()
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    return lambda: (os.listdir(fd), flags(fd))


@kind("a directory read halfway (os.scandir)")
def directory_halfway():
    directory = place("directory")
    for number in range(20):
        (directory / str(number)).touch()
    entries = os.scandir(directory)
    seen = {next(entries).name for _ in range(5)}
    rest: set[str] = set()

    def show():
        rest.update(entry.name for entry in entries)
        return len(seen | rest), len(seen & rest)

    return show


@kind("a directory that was deleted while it is open")
def directory_deleted():
    directory = place("directory")
    fd = os.open(directory, os.O_RDONLY)
    directory.rmdir()
    return lambda: (os.listdir(fd), os.fstat(fd).st_nlink), lambda: os.close(fd)


@kind("a changed working directory", alone="changes the whole process")
def working_directory():
    before, directory = os.getcwd(), place("work")
    os.chdir(directory)
    return lambda: (os.getcwd() == str(directory), os.listdir()), lambda: os.chdir(before)


@kind("a changed umask")
def umask():
    os.umask(0o027)

    def show():
        mask = os.umask(0)
        os.umask(mask)
        return oct(mask)

    return show, lambda: os.umask(0o022)


@kind("a lock on a whole file (flock)")
def flock():
    path = place("lock") / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    other = os.open(path, os.O_RDWR)
    return lambda: (
        error_of(lambda: fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)),
        fdinfo(fd).get("lock", "")[:20],
    )


@kind("a shared lock (flock LOCK_SH)")
def flock_shared():
    path = place("lock") / "file"
    fds = [os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(3)]
    for fd in fds[:2]:
        fcntl.flock(fd, fcntl.LOCK_SH)
    return lambda: error_of(lambda: fcntl.flock(fds[2], fcntl.LOCK_EX | fcntl.LOCK_NB))


def locks_of(path: Path) -> list[str]:
    """The locks that the system lists for a file: kind, mode, range."""
    inode = f":{path.stat().st_ino}"
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return sorted(
        " ".join([*words[1:4], *words[-2:]]) for words in lines if any(word.endswith(inode) for word in words)
    )


@kind("a POSIX lock on a range of a file (lockf)")
def posix_lock():
    path = place("lock") / "file"
    path.write_bytes(b"x" * 100)
    fd = os.open(path, os.O_RDWR)
    fcntl.lockf(fd, fcntl.LOCK_EX, 10, 20)
    return lambda: (fd, locks_of(path))


@kind("POSIX locks on a file that is mapped, too, of the notebook and of a child")
def posix_lock_of_mapped():
    path = place("lock") / "file"
    path.write_bytes(b"x" * 100)
    fd = os.open(path, os.O_RDWR)
    memory = mmap.mmap(fd, 100)
    fcntl.lockf(fd, fcntl.LOCK_EX, 10, 20)
    fcntl.lockf(fd, fcntl.LOCK_SH, 5, 60)
    code = (
        "import fcntl, mmap, sys, time; f = open(sys.argv[1], 'r+'); m = mmap.mmap(f.fileno(), 100)\n"
        "fcntl.lockf(f, fcntl.LOCK_EX, 0, 80); print(flush=True); time.sleep(1000)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    child.stdout.readline()

    def undo():
        child.kill()
        child.communicate()
        memory.close()
        os.close(fd)

    def show():
        number = next(number for number, name in procfs.links(child.pid) if name == str(path))
        texts = [procfs.read(f"/proc/{pid}/fdinfo/{of}") for pid, of in (("self", fd), (child.pid, number))]
        return [[line.split()[2:] for line in text.splitlines() if "POSIX" in line] for text in texts]

    return show, undo


@kind("an open file description lock (OFD)")
def ofd_lock():
    path = place("lock") / "file"
    path.write_bytes(b"x" * 100)
    fd, other = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, whole)
    return lambda: (error_of(lambda: fcntl.fcntl(other, fcntl.F_OFD_SETLK, whole)), locks_of(path))


@kind("a lease on a file (F_SETLEASE)")
def lease():
    path = place("lease") / "file"
    path.write_text("leased")
    fd = os.open(path, os.O_RDONLY)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    return lambda: fcntl.fcntl(fd, fcntl.F_GETLEASE), lambda: os.close(fd)


@kind(
    "a notification on a directory (dnotify)",
    refused("FILE_UNSUPPORTED", "notif"),
    alone="is refused",
    advice="Close the directory.",
)
def dnotify():
    directory, number, count = place("notified"), signal.SIGRTMIN + 12, [0]
    before = signal.signal(number, lambda *_: count.__setitem__(0, count[0] + 1))
    fd = os.open(directory, os.O_RDONLY)
    fcntl.fcntl(fd, fcntl.F_SETSIG, number)
    fcntl.fcntl(fd, fcntl.F_NOTIFY, fcntl.DN_CREATE | fcntl.DN_MULTISHOT)

    def show():
        was = count[0]
        (directory / f"new{was}").touch()
        return eventually(lambda: count[0] > was, 3)

    return show, lambda: (os.close(fd), signal.signal(number, before))


@kind("a file in shared memory (/dev/shm), open")
def in_shared_memory():
    path = Path(tempfile.mktemp(prefix="zoo-", dir="/dev/shm"))
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.write(fd, b"shared")
    return lambda: os.pread(fd, 9, 0).decode(), lambda: path.unlink()


@kind("a sparse file of a terabyte")
def sparse():
    path = place("sparse") / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"end", 1 << 40)
    os.lseek(fd, 1 << 40, os.SEEK_SET)
    return lambda: (os.lseek(fd, 0, os.SEEK_CUR), os.fstat(fd).st_size), lambda: os.close(fd)


@kind("a gzip file, half written")
def gzip_half():
    path = place("gzip") / "file.gz"
    file = gzip.open(path, "wb")
    file.write(b"half" * 1000)

    def show():
        file.flush()
        copy = io.BytesIO(path.read_bytes())
        with contextlib.suppress(EOFError), gzip.open(copy) as seen:
            return seen.read(4000).count(b"half"), file.tell()

    return show


@kind("a zip file, half written")
def zip_half():
    path = place("zip") / "file.zip"
    archive = zipfile.ZipFile(path, "w")
    archive.writestr("first", "one")
    return lambda: (archive.namelist(), path.stat().st_size, archive.fp.tell())


@kind("logging with handlers, one of them rotating")
def logs():
    directory = place("logs")
    log = logging.getLogger("zoo.files")
    log.propagate = False
    handlers = [
        logging.FileHandler(directory / "plain.log"),
        logging.handlers.RotatingFileHandler(directory / "turns.log", maxBytes=500, backupCount=3),
        logging.handlers.WatchedFileHandler(directory / "watched.log"),
        logging.handlers.MemoryHandler(1000),
    ]
    for handler in handlers:
        log.addHandler(handler)
    for number in range(50):
        log.warning("entry %d", number)

    def show():
        return [path.read_text() for path in sorted(directory.iterdir())], len(handlers[3].buffer)

    return show


@kind("an SQLite database in memory")
def sqlite_memory():
    database = sqlite3.connect(":memory:", isolation_level=None)
    database.execute("create table t (n)")
    database.executemany("insert into t values (?)", [(n,) for n in range(1000)])
    return lambda: (database.execute("select sum(n) from t").fetchone(), database.total_changes)


@kind("an SQLite database with an open transaction")
def sqlite_transaction():
    path = place("sqlite") / "base"
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("create table t (n)")
    database.execute("begin immediate")
    database.execute("insert into t values (1)")

    def show():
        with contextlib.closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as other:
            blocked = error_of(lambda: other.execute("begin immediate"))
            count = other.execute("select count(*) from t").fetchone()
        return database.in_transaction, database.execute("select count(*) from t").fetchone(), count, blocked

    return show, database.close


@kind("an SQLite database with a write-ahead log, and a query read halfway")
def sqlite_wal():
    database = sqlite3.connect(place("sqlite") / "base", isolation_level=None)
    database.execute("pragma journal_mode = wal")
    database.execute("create table t (n)")
    database.executemany("insert into t values (?)", [(n,) for n in range(1000)])
    rows = database.execute("select n from t")
    rows.fetchmany(500)
    rest: list[int] = []

    def show():
        rest.extend(row[0] for row in rows)
        return sum(rest), database.execute("pragma journal_mode").fetchone()

    return show, database.close


@kind("an SQLite database with a write-ahead log, and a transaction that keeps others from writing")
def sqlite_wal_writer():
    path = place("sqlite") / "base"
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("pragma journal_mode = wal")
    database.execute("create table t (n)")
    database.execute("begin immediate")
    database.execute("insert into t values (1)")
    code = (
        "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None).execute('begin immediate')"
    )

    def show():
        other = subprocess.run([sys.executable, "-c", code, str(path)], stderr=subprocess.PIPE, text=True)
        return other.stderr.splitlines()[-1:], database.execute("select * from t").fetchall()

    return show, database.close


@kind("a dbm database, open")
def dbm_open():
    database = dbm.dumb.open(str(place("dbm") / "base"), "c")
    database["key"] = "value"
    return lambda: (database["key"].decode(), len(database))


@kind("a memory-mapped file read line by line (mmap)")
def mmap_lines():
    path = place("mmap") / "lines"
    path.write_text("".join(f"line {n}\n" for n in range(100)))
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    mapped.seek(50)
    return lambda: (mapped.tell(), mapped.find(b"line 99"), mapped[:6].decode(), mapped.closed)


@kind("an imported module whose source changed on disk")
def changed_module():
    import importlib.util

    path = place("module") / "zoo_module.py"
    path.write_text("value = 1\n")
    spec = importlib.util.spec_from_file_location("zoo_module", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path.write_text("value = 2 + 0\n")
    return lambda: (module.value, path.read_text())


@kind("extended attributes and times of an open file")
def attributes():
    path = place("file") / "attributes"
    path.write_text("x")
    fd = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.setxattr(fd, "user.zoo", b"striped")
    os.utime(path, ns=(10**9, 2 * 10**9))
    return lambda: (os.fstat(fd).st_mtime_ns, os.listxattr(fd), oct(os.fstat(fd).st_mode))


@kind("a file's mode and owner changed while it is open")
def mode_changed():
    path = place("file") / "mode"
    path.write_text("mine")
    fd = os.open(path, os.O_RDWR)
    os.fchmod(fd, 0o000)
    return lambda: (os.pread(fd, 9, 0).decode(), oct(os.fstat(fd).st_mode)), lambda: os.close(fd)


@kind(
    "a changed root directory (chroot)",
    refused("FILE_UNSUPPORTED", "root directory"),
    user=IMPOSSIBLE,
    alone="changes the whole process",
)
def chroot():
    root = os.open("/", os.O_RDONLY)
    directory = place("root")
    for name in ("proc", "dev", "usr", "lib", "lib64", "tmp"):
        (directory / name).mkdir()
    code = os.fork()
    if code == 0:  # tried in a child: a refusal there does no harm
        os._exit(0 if error_of(lambda: os.chroot(directory)) == "none" else 1)
    if os.waitpid(code, 0)[1]:
        raise PermissionError("chroot")
    cwd = os.getcwd()
    os.chroot(directory)
    inside = os.stat("/").st_ino

    def undo():
        os.fchdir(root)
        os.chroot(".")
        os.chdir(cwd)
        os.close(root)

    return lambda: os.stat("/").st_ino == inside, undo


@kind(
    "a file system that the notebook mounted",
    refused("FILE_UNSUPPORTED", "mount"),
    user=IMPOSSIBLE,
    alone="changes the mounts",
    advice="Unmount it.",
)
def own_mount():
    target = place("mount")
    ctypes.set_errno(0)
    libc("mount", b"tmpfs", str(target).encode(), b"tmpfs", 0, None)
    (target / "file").write_text("in memory")
    return lambda: (target / "file").read_text(), lambda: libc("umount2", str(target).encode(), 2)


@kind("JSON lines written by many small appends")
def json_lines():
    path = place("jsonl") / "records"
    file = open(path, "a", buffering=1)
    for n in range(10):
        file.write(json.dumps({"n": n}) + "\n")
    return lambda: (len(path.read_text().splitlines()), file.tell(), file.line_buffering)
