"""Libraries that notebooks use: their memory, their threads, their sockets."""

from __future__ import annotations

import hashlib
import os
import threading

from . import documented, kind
from .asking import error_of, eventually, place

ALLOCATOR = "brings much memory"


@kind("NumPy arrays: contiguous, strided, views, structured, of objects", needs="numpy")
def arrays():
    import numpy

    whole = numpy.arange(10_000_000, dtype="float64")
    views = [whole[::7], whole.reshape(1000, -1).T, numpy.asfortranarray(whole[:100].reshape(10, 10))]
    records = numpy.array([(1, "a"), (2, "b")], dtype=[("n", "i4"), ("s", "U3")])
    things = numpy.array([{"a": 1}, None, [2]], dtype=object)

    def show():
        sums = [float(view.sum()) for view in views]
        return (
            sums,
            views[0].base is not None,
            records["s"].tolist(),
            things.tolist(),
            hashlib.sha256(whole).hexdigest(),
        )

    return show


@kind("the state of NumPy's random number generators", needs="numpy")
def numpy_random():
    import numpy

    generator, legacy = numpy.random.default_rng(7), numpy.random.RandomState(7)
    generator.normal(size=3)
    legacy.normal(size=3)
    return lambda: (repr(generator.bit_generator.state), hashlib.sha256(repr(legacy.get_state()).encode()).hexdigest())


@kind("a NumPy array over a file (memmap)", needs="numpy")
def memmap():
    import numpy

    path = place("memmap") / "array"
    one = numpy.memmap(path, dtype="int64", mode="w+", shape=(1000, 100))
    one[500] = 7
    read = numpy.memmap(path, dtype="int64", mode="r", shape=(1000, 100), offset=0)
    copy = numpy.memmap(path, dtype="int64", mode="c", shape=(1000, 100))
    copy[0] = 9

    def show():
        one[1, 1] = 5
        return int(one.sum()), int(read[1, 1]), int(copy[0, 0]), int(read[0, 0]), path.stat().st_size

    return show


@kind("NumPy's settings: errors, printing, its threads", needs="numpy")
def numpy_settings():
    import numpy

    numpy.seterr(divide="raise")
    numpy.set_printoptions(precision=3)
    product = numpy.ones((300, 300)) @ numpy.ones((300, 300))
    return lambda: (numpy.geterr(), numpy.get_printoptions()["precision"], float(product.sum())), lambda: numpy.seterr(
        divide="warn"
    )


@kind("a pandas table, its groups, an open reader", needs="pandas")
def pandas_table():
    import pandas

    table = pandas.DataFrame(
        {"a": range(1000), "b": list("xyzw") * 250, "t": pandas.date_range("2026-01-01", periods=1000)}
    )
    groups = table.groupby("b")
    path = place("pandas") / "table.csv"
    table.to_csv(path)
    reader = pandas.read_csv(path, chunksize=100)
    next(reader)

    def show():
        return pandas.util.hash_pandas_object(table).sum(), groups["a"].sum().to_dict(), reader._currow

    return show


@kind("torch tensors on the CPU, views and shared storage", needs="torch")
def tensors():
    import torch

    base = torch.arange(1_000_000, dtype=torch.float32)
    view = base.view(1000, 1000).t()[::2]
    view[0, 0] = 7
    return lambda: (float(base.sum()), float(base[0]), view.data_ptr() == base.data_ptr(), view.stride())


@kind("a torch model in training: gradients, optimizer, schedule, graph", needs="torch")
def training():
    import torch

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(50, 1))
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 20)).sum().backward()
        optimizer.step()
        schedule.step()
    pending = model(torch.randn(8, 20)).sum()

    def show():
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        grads = torch.cat([p.grad.flatten() for p in model.parameters()])
        return (
            float(flat.sum()),
            float(grads.sum()),
            schedule.last_epoch,
            pending.requires_grad,
            optimizer.param_groups[0]["lr"],
        )

    return show


@kind("torch's random number generator, threads and settings", needs="torch")
def torch_random():
    import torch

    generator = torch.Generator().manual_seed(5)
    torch.randn(3, generator=generator)
    torch.set_num_threads(2)
    return lambda: (
        hashlib.sha256(generator.get_state().numpy()).hexdigest(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
    )


@kind("a tensor in shared memory (share_memory_)", needs="torch")
def shared_tensor():
    import torch

    one = torch.arange(1000).share_memory_()
    return lambda: (one.is_shared(), int(one.sum()))


@kind("a tensor over a file (torch.from_file), an open dataset", needs="torch")
def file_tensor():
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    path = place("torch") / "tensor"
    path.write_bytes(b"\x01" * 4000)
    mapped = torch.from_file(str(path), shared=True, size=1000, dtype=torch.int32)
    batches = iter(DataLoader(TensorDataset(torch.arange(100)), batch_size=10, shuffle=False))
    next(batches)
    return lambda: (int(mapped[0]), batches._num_yielded, len(batches))


@kind("progress bars (tqdm), in text and as widgets", needs="tqdm ipywidgets")
def progress():
    import tqdm
    import tqdm.notebook

    bars = [tqdm.tqdm(total=100, file=open(os.devnull, "w")), tqdm.notebook.tqdm(total=50, display=False)]
    for bar in bars:
        bar.update(7)
    return lambda: [(bar.n, bar.total, bar.format_dict["elapsed"] < 3600) for bar in bars], lambda: [
        bar.close() for bar in bars
    ]


@kind("ZeroMQ sockets inside the process (inproc)", needs="zmq")
def zmq_inside():
    import zmq

    context = zmq.Context()
    one, other = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    one.bind("inproc://zoo")
    other.connect("inproc://zoo")
    one.send(b"under way")

    def show():
        word = other.recv() if other.poll(5000) else b"lost"
        one.send(word)
        return word.decode()

    return show, lambda: (one.close(0), other.close(0))


@kind("ZeroMQ sockets over unix sockets (ipc), which reconnect", needs="zmq")
def zmq_ipc():
    import zmq

    context, name = zmq.Context(), f"ipc://z{os.getpid()}.sock"
    server, client = context.socket(zmq.REP), context.socket(zmq.REQ)
    server.bind(name)
    client.connect(name)

    def serve() -> None:
        while True:
            server.send(server.recv().upper())

    threading.Thread(target=serve, daemon=True).start()

    def show():
        client.send(b"hello")
        return client.recv().decode() if client.poll(20_000) else "no answer"

    return show


@kind(
    "ZeroMQ sockets over TCP, which reconnect",
    needs="zmq",
    alone="its connections come back closed",
)
def zmq_tcp():
    import zmq

    context = zmq.Context()
    server, client = context.socket(zmq.REP), context.socket(zmq.REQ)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    client.connect(f"tcp://127.0.0.1:{port}")
    client.setsockopt(zmq.REQ_RELAXED, 1)

    def serve() -> None:
        while True:
            server.send(server.recv().upper())

    threading.Thread(target=serve, daemon=True).start()

    def show():
        for _ in range(10):
            client.send(b"hello")
            if client.poll(2000):
                return client.recv().decode()
        return "no answer"

    return show


@kind(
    "a process as psutil knows it",
    documented("`is_running() == False`"),
    needs="psutil",
    alone="compares start times",
    advice="Make it anew.",
)
def psutil_process():
    import psutil

    one = psutil.Process()
    one.create_time()
    return lambda: (one.is_running(), one.pid, one == psutil.Process())


@kind("a tornado event loop: callbacks, a web application", needs="tornado")
def tornado_application():
    import asyncio
    import urllib.request

    import tornado.web

    class Handler(tornado.web.RequestHandler):
        def get(self) -> None:
            self.write("tornado")

    loop, port = asyncio.new_event_loop(), []

    async def prepare():
        import tornado.httpserver
        import tornado.netutil

        server = tornado.httpserver.HTTPServer(tornado.web.Application([("/", Handler)]))
        sockets = tornado.netutil.bind_sockets(0, "127.0.0.1")
        server.add_sockets(sockets)
        port.append(sockets[0].getsockname()[1])

    threading.Thread(target=loop.run_forever, daemon=True).start()
    asyncio.run_coroutine_threadsafe(prepare(), loop).result(60)

    def show():
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{port[0]}/", timeout=60) as reply:
            return reply.read().decode()

    return show


@kind("a zstandard stream and a blake3 hash in progress", needs="zstandard blake3")
def native_streams():
    import blake3
    import zstandard

    hasher, compressor = blake3.blake3(), zstandard.ZstdCompressor().compressobj()
    hasher.update(b"half")
    head = compressor.compress(b"half" * 10_000)
    return lambda: (hasher.hexdigest(), len(head), zstandard.decompress(zstandard.compress(b"x")).decode())


@kind("keys and ciphers of cryptography, in progress", needs="cryptography")
def ciphers():
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    encryptor = Cipher(algorithms.AES(b"k" * 32), modes.CTR(b"n" * 16)).encryptor()
    head = encryptor.update(b"half of it")
    used = []

    def show():
        if not used:
            used.append(encryptor.update(b"the other half").hex())
        return head.hex(), used

    return show


@kind("a cffi structure with a callback", needs="cffi")
def cffi_callback():
    import cffi

    ffi = cffi.FFI()
    ffi.cdef("typedef struct { int a; char b[8]; } zoo;")
    one = ffi.new("zoo *", {"a": 7, "b": b"cffi"})
    function = ffi.callback("int(int)", lambda n: n + 1)
    return lambda: (one.a, ffi.string(one.b).decode(), function(41))


@kind("a pillow image, a font, an animation at a frame", needs="PIL")
def pictures():
    from PIL import Image

    picture = Image.effect_mandelbrot((200, 200), (-2, -1, 1, 1), 50)
    path = place("picture") / "moving.gif"
    picture.save(path, save_all=True, append_images=[picture.rotate(90)])
    moving = Image.open(path)
    moving.seek(1)
    return lambda: (hashlib.sha256(picture.tobytes()).hexdigest(), moving.tell(), error_of(lambda: moving.seek(9)))


@kind("a requests session, its cookies and pool", needs="requests")
def requests_session():
    import requests

    session = requests.Session()
    session.headers["X-Zoo"] = "1"
    session.cookies.set("a", "b")
    return lambda: (session.headers["X-Zoo"], session.cookies.get_dict(), sorted(session.adapters))


@kind("an aiohttp client session on its loop", needs="aiohttp")
def aiohttp_session():
    import asyncio

    import aiohttp

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def prepare():
        return aiohttp.ClientSession(headers={"X-Zoo": "1"})

    session = asyncio.run_coroutine_threadsafe(prepare(), loop).result(60)

    async def end():
        await session.close()

    return lambda: (session.closed, session.headers["X-Zoo"]), lambda: asyncio.run_coroutine_threadsafe(
        end(), loop
    ).result(60)


@kind("a simulation in progress (simpy)", needs="simpy")
def simulation():
    import simpy

    world, seen = simpy.Environment(), []

    def clock():
        while True:
            seen.append(world.now)
            yield world.timeout(3)

    world.process(clock())
    world.run(until=10)

    def show():
        before = world.now
        world.run(until=before + 3)
        return world.now - before, seen[-1] - seen[-2]

    return show


@kind("a compiled pattern of re, a scanner at a position")
def patterns():
    import re

    scanner = re.compile(r"(\w)(\d+)").scanner("a1 b22 c333")
    first = scanner.search().group()
    rest: list[str] = []

    def show():
        while match := scanner.search():
            rest.append(match.group())
        return first, rest

    return show


@kind("a thread pool that works with NumPy", needs="numpy")
def numpy_threads():
    import concurrent.futures

    import numpy

    pool = concurrent.futures.ThreadPoolExecutor(2)

    def show():
        parts = [
            pool.submit(lambda n=n: float((numpy.ones((200, 200)) * n @ numpy.ones((200, 200))).sum())) for n in (1, 2)
        ]
        return [part.result(60) for part in parts]

    return show, pool.shutdown


@kind("a polling file watcher (watchdog)")
def polling_watcher():
    directory = place("polled")
    seen, stop = set(), threading.Event()

    def run() -> None:
        while not stop.wait(0.02):
            seen.update(os.listdir(directory))

    threading.Thread(target=run, daemon=True).start()

    def show():
        name = f"new{len(seen)}"
        (directory / name).touch()
        return eventually(lambda: name in seen)

    return show, stop.set
