"""Objects of Python and its standard library that live only in memory."""

from __future__ import annotations

import array
import asyncio
import atexit
import codecs
import collections
import contextvars
import csv
import ctypes
import decimal
import email.parser
import functools
import gc
import hashlib
import heapq
import importlib.util
import io
import itertools
import json
import locale
import lzma
import operator
import pickle
import random
import selectors
import ssl
import string
import sys
import threading
import tracemalloc
import types
import warnings
import weakref
import zlib
from pathlib import Path

from . import kind, refused
from .asking import error_of, moves, place


@kind("nested generators")
def generators():
    def inner():
        yield from range(100)

    def outer():
        word = yield "ready"
        for number in inner():
            word = yield word, number

    one = outer()
    next(one)
    one.send("a")
    count = itertools.count(7, 3)
    return lambda: (one.gi_frame.f_locals["word"], repr(count), one.gi_running)


@kind("a suspended generator")
def generator_continues():
    def squares():
        for number in range(10**6):
            yield number * number

    one, seen = squares(), []
    return lambda: (seen.append(next(one)), [a - b for a, b in zip(seen[1:], seen, strict=False)][:1] in ([], [1]))[1]


@kind("an asynchronous generator, coroutines that have not started")
def asynchronous():
    async def numbers():
        for number in range(10):
            yield number

    async def later():
        return "later"

    one, coroutine = numbers(), later()
    with contextlib_suppress_stop():
        one.__anext__().send(None)
    return lambda: (one.ag_frame.f_locals["number"], coroutine.cr_frame is not None), coroutine.close


def contextlib_suppress_stop():
    import contextlib

    return contextlib.suppress(StopIteration)


@kind("tasks of asyncio in the kernel's own loop")
def kernel_tasks():
    count, event = [0], asyncio.Event()

    async def tick() -> None:
        while True:
            await asyncio.sleep(0.01)
            count[0] += 1

    loop = asyncio.get_event_loop()
    tasks = [loop.create_task(tick(), name="zoo tick"), loop.create_task(event.wait(), name="zoo wait")]
    loop.call_later(0, lambda: None)

    def show():
        return [(task.get_name(), task.done()) for task in tasks], event.is_set()

    return show, lambda: [task.cancel() for task in tasks]


@kind("an asyncio loop on a thread, with tasks, locks, queues and a future")
def loop_on_thread():
    loop, count = asyncio.new_event_loop(), [0]
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def prepare():
        async def tick() -> None:
            while True:
                await asyncio.sleep(0.01)
                count[0] += 1

        keep.append(loop.create_task(tick()))
        lock, queue, future = asyncio.Lock(), asyncio.Queue(), loop.create_future()
        await lock.acquire()
        await queue.put("in the queue")
        return lock, queue, future

    keep: list[object] = []
    lock, queue, future = asyncio.run_coroutine_threadsafe(prepare(), loop).result(60)

    async def ask():
        word = await queue.get()
        await queue.put(word)
        return word, lock.locked(), future.done()

    return lambda: (asyncio.run_coroutine_threadsafe(ask(), loop).result(60), moves(lambda: count[0]))


@kind("a server and a connection of asyncio streams over a socket pair")
def streams():
    import socket

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    a, b = socket.socketpair()

    async def prepare():
        return await asyncio.open_connection(sock=a), await asyncio.open_connection(sock=b)

    (r1, w1), (r2, w2) = asyncio.run_coroutine_threadsafe(prepare(), loop).result(60)

    async def swap():
        w1.write(b"there\n")
        there = await r2.readline()
        w2.write(there.upper())
        return (await r1.readline()).decode()

    return lambda: asyncio.run_coroutine_threadsafe(swap(), loop).result(60)


@kind("a second interpreter with variables of its own (subinterpreter)")
def subinterpreter():
    if sys.version_info >= (3, 13):
        import _interpreters as interpreters
    else:
        import _xxsubinterpreters as interpreters
    identity = interpreters.create()
    path = place("sub") / "said"
    run = getattr(interpreters, "run_string", None) or interpreters.exec
    run(identity, "x = 40; import itertools; n = itertools.count(2)")

    def show():
        run(identity, f"x += 1; open({str(path)!r}, 'w').write(str(x - next(n)))")
        return path.read_text()

    return show


@kind("a ctypes callback")
def callback():
    compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))(
        lambda a, b: a[0] - b[0]
    )

    def show():
        numbers = (ctypes.c_int * 5)(5, 1, 4, 2, 3)
        ctypes.CDLL(None).qsort(numbers, 5, 4, compare)
        return list(numbers)

    return show


@kind("ctypes structures and pointers")
def structures():
    class Node(ctypes.Structure):
        pass

    Node._fields_ = [("value", ctypes.c_int), ("next", ctypes.POINTER(Node))]
    nodes = [Node(n) for n in range(5)]
    for one, other in itertools.pairwise(nodes):
        one.next = ctypes.pointer(other)

    def show():
        values, node = [], nodes[0]
        while node:
            values.append(node.value)
            node = node.next.contents if node.next else None
        return values

    return show


@kind("a library that was loaded at run time (dlopen), its state inside")
def loaded_library():
    library = ctypes.CDLL("libm.so.6")
    library.lgamma.restype = ctypes.c_double
    library.lgamma(ctypes.c_double(-0.5))
    return lambda: ctypes.c_int.in_dll(library, "signgam").value


@kind(
    "a library whose file was replaced after it was loaded",
    user=refused("DELETED_MAPPING", "deleted"),
    advice="Import it anew before (restart the kernel).",
)
def replaced_library():
    source = next(
        Path(directory) / "libm.so.6"
        for directory in ("/lib/x86_64-linux-gnu", "/usr/lib64", "/lib64")
        if (Path(directory) / "libm.so.6").exists()
    )
    path = place("library") / "libzoo.so"
    path.write_bytes(source.read_bytes())
    library = ctypes.CDLL(str(path))
    library.cos.restype = ctypes.c_double
    path.unlink()
    path.write_bytes(source.read_bytes())
    return lambda: library.cos(ctypes.c_double(0.0))


@kind("weak references, finalizers, weak dictionaries")
def weak():
    class Thing:
        pass

    thing, called = Thing(), []
    reference, cache = weakref.ref(thing), weakref.WeakValueDictionary(thing=thing)
    finalizer = weakref.finalize(thing, called.append, 1)
    gone = weakref.ref(Thing())
    return lambda: (reference() is thing, cache["thing"] is thing, finalizer.alive, gone() is None, called)


@kind("the garbage collector's settings, and garbage")
def garbage():
    before = gc.get_threshold()
    gc.set_threshold(701, 11, 12)
    gc.freeze()
    return lambda: (gc.get_threshold(), gc.isenabled()), lambda: (gc.set_threshold(*before), gc.unfreeze())


@kind("context variables, in contexts of their own")
def context_variables():
    variable = contextvars.ContextVar("zoo", default="none")
    context = contextvars.copy_context()
    context.run(variable.set, "inside")
    return lambda: (context.run(variable.get), variable.get())


@kind("the state of the random number generator")
def random_numbers():
    one = random.Random(7)
    one.gauss(0, 1)
    return lambda: (hashlib.sha256(repr(one.getstate()).encode()).hexdigest(), len(random.getstate()[1]))


@kind("an exception with its traceback and frames")
def exception():
    def fail(secret: str) -> None:
        raise ValueError("kept")

    try:
        fail("local")
    except ValueError as error:
        caught = error
    frame = caught.__traceback__.tb_next.tb_frame
    return lambda: (str(caught), frame.f_locals["secret"], frame.f_code.co_name)


@kind("a profile or trace function (sys.setprofile, threading.settrace)", alone="slows the others")
def profile():
    calls = [0]
    threading.setprofile(lambda *_: None)

    def show():
        sys.setprofile(lambda *_: calls.__setitem__(0, calls[0] + 1))
        before = calls[0]
        len(string.ascii_letters)
        moved = calls[0] > before
        sys.setprofile(None)
        return moved

    return show, lambda: threading.setprofile(None)


@kind("traced memory (tracemalloc)", alone="slows the others")
def traced_memory():
    tracemalloc.start(3)
    block = bytearray(1 << 20)
    return lambda: (tracemalloc.is_tracing(), tracemalloc.get_object_traceback(block) is not None), tracemalloc.stop


@kind("a locale, the precision of decimals, filters of warnings")
def settings():
    locale.setlocale(locale.LC_ALL, "C.UTF-8")
    context = decimal.Context(prec=50)
    warnings.simplefilter("ignore", ResourceWarning)
    return lambda: (locale.getlocale(), str(context.divide(1, 7)), len(warnings.filters) > 1)


@kind("sys.path, modules created at run time, import hooks")
def imports():
    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "zoo_dreamt":
                return importlib.util.spec_from_loader(name, Finder)
            return None

        @staticmethod
        def create_module(spec):
            return None

        @staticmethod
        def exec_module(module):
            module.value = "dreamt"

    sys.meta_path.append(Finder)
    sys.modules["zoo_made"] = types.ModuleType("zoo_made")
    sys.path.append("/zoo")

    def show():
        sys.modules.pop("zoo_dreamt", None)
        import zoo_dreamt

        return zoo_dreamt.value, "zoo_made" in sys.modules, "/zoo" in sys.path

    return show, lambda: (sys.meta_path.remove(Finder), sys.path.remove("/zoo"))


@kind("functions registered with atexit, not called by a wake")
def at_exit():
    called = []
    atexit.register(called.append, 1)
    return lambda: (called, atexit._ncallbacks() > 0)


@kind("half-consumed iterators of lists, dictionaries, files, maps and filters")
def iterators():
    table = dict.fromkeys(range(100))
    ones = [
        iter(range(100)),
        iter([*range(100)]),
        iter(table),
        zip(range(9), range(9), strict=True),
        map(abs, [-1, -2, -3]),
    ]
    for one in ones:
        next(one)
    return lambda: [repr(one.__reduce__())[:300] if not isinstance(one, map) else "map" for one in ones]


@kind("caches of functions (functools.lru_cache, cached_property)")
def caches():
    calls = [0]

    @functools.lru_cache(maxsize=3)
    def slow(n):
        calls[0] += 1
        return n * 2

    for n in (1, 2, 3, 4):
        slow(n)
    return lambda: (slow(4), calls[0], slow.cache_info().currsize)


@kind("compression streams in progress (zlib, lzma, bz2)")
def compression():
    import bz2

    data = b"compress me " * 5000
    halves = []
    for make, undo in (
        (zlib.compressobj, zlib.decompress),
        (lzma.LZMACompressor, lzma.decompress),
        (bz2.BZ2Compressor, bz2.decompress),
    ):
        one = make()
        halves.append((one, one.compress(data), undo))
    copy = halves[0][0]
    return lambda: (halves[0][2](halves[0][1] + copy.copy().flush())[:8].decode(), len(halves[1][1]), len(halves[2][1]))


@kind("hashes in progress (hashlib, hmac)")
def hashing():
    import hmac

    one, two = hashlib.sha256(b"half "), hmac.new(b"key", b"half", "sha512")
    one.update(b"and half")
    return lambda: (one.hexdigest(), two.hexdigest(), hashlib.blake2b(b"x").hexdigest()[:8])


@kind("an encrypted connection over a socket pair (ssl)")
def encrypted():
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    one = context.wrap_bio(incoming, outgoing, server_hostname="example.org")
    what = error_of(one.do_handshake)
    return lambda: (what, outgoing.pending, context.verify_mode, one.version(), error_of(one.do_handshake))


@kind("incremental decoders and parsers (codecs, email, csv, json)")
def parsers():
    decoder = codecs.getincrementaldecoder("utf-8")()
    decoder.decode("ä".encode()[:1])
    mail = email.parser.BytesFeedParser()
    mail.feed(b"Subject: half\n\nbo")
    rows = csv.reader(io.StringIO("a,b\n1,2\n3,4\n"))
    next(rows)
    return lambda: (repr(decoder.getstate()), rows.line_num, json.loads('{"a": [1, 2]}'))


@kind("memory views, arrays, byte streams at a position")
def views():
    buffer = bytearray(b"0123456789")
    view = memoryview(buffer)[2:8:2]
    numbers, stream = array.array("d", [0.1, 0.2, float("inf")]), io.BytesIO(b"stream")
    stream.seek(3)
    return lambda: (bytes(view).decode(), error_of(lambda: buffer.append(1)), numbers.tolist()[:2], stream.tell())


@kind("redirected standard output (sys.stdout)")
def redirected():
    text = io.StringIO()
    text.write("captured")
    old, sys.stdout = sys.stdout, text
    sys.stdout = old
    return lambda: (text.getvalue(), text.tell(), type(sys.stdout).__name__)


@kind("classes, closures and modules that were changed at run time")
def changed_classes():
    class Base:
        def word(self):
            return "base"

    class Derived(Base):
        __slots__ = ("value",)

    one = Derived()
    one.value = 7
    Base.word = lambda self: f"changed {self.value}"
    cell = (lambda x: lambda: x)(41).__closure__[0]
    cell.cell_contents = 42
    return lambda: (one.word(), cell.cell_contents, Derived.__mro__[1].__name__)


@kind("reference cycles and reference counts")
def circles():
    circle: list[object] = []
    circle.append(circle)
    thing = object()
    holders = [thing] * 50
    return lambda: (
        circle[0] is circle,
        sys.getrefcount(thing) > 50,
        len(holders),
        sys.intern("zoo") is sys.intern("zoo"),
    )


@kind("the recursion limit and the thread switch interval")
def interpreter_limits():
    sys.setrecursionlimit(4321)
    sys.setswitchinterval(0.007)
    return lambda: (sys.getrecursionlimit(), round(sys.getswitchinterval(), 6)), lambda: sys.setswitchinterval(0.005)


@kind("collections: queues with a bound, ordered, counted, chained, heaps")
def containers():
    bounded = collections.deque([1, 2, 3], maxlen=3)
    bounded.append(4)
    heap = [5, 1, 4]
    heapq.heapify(heap)
    chain = collections.ChainMap({"a": 1}, {"b": 2})
    return lambda: (list(bounded), bounded.maxlen, heap, dict(chain), collections.Counter("zoo").most_common(1))


@kind("a large object graph: a million small objects")
def many_objects():
    things = [(n, str(n)) for n in range(300_000)]
    table = dict(things)
    return lambda: (len(things), table[299_999], hashlib.sha256(pickle.dumps(things[::1000])).hexdigest())


@kind("a selector with its files (selectors)")
def selector():
    import os

    r, w = os.pipe()
    one = selectors.DefaultSelector()
    one.register(r, selectors.EVENT_READ, "data")
    os.write(w, b"x")
    return lambda: [(key.data, mask) for key, mask in one.select(5)]


@kind("lambdas, partials and methods bound to objects")
def bound():
    add = functools.partial(operator.add, 40)
    method = [].append
    return lambda: (add(2), method.__self__ == [], (lambda x=7: x)())


@kind("compiled code and its adaptive instruction caches")
def hot_code():
    def hot(n):
        total = 0
        for i in range(n):
            total += i
        return total

    for _ in range(200):
        hot(100)
    return lambda: hot(1000)


@kind("greenlets", needs="greenlet")
def greenlets():
    import greenlet

    def body():
        for number in range(100):
            greenlet.getcurrent().parent.switch(number)

    one = greenlet.greenlet(body)
    first = one.switch()
    got = [first]

    def show():
        got.append(one.switch())
        return got[-1] - got[-2], one.dead

    return show
