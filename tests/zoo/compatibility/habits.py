"""Rows about habits: widgets, connections, threads, commands, what a notebook has running beside it."""

from __future__ import annotations

from .row import Row

#: A web server in a thread of the kernel, on ``port``.
_SERVER = (
    "import http.server, threading\nclass Handler(http.server.BaseHTTPRequestHandler):\n"
    "    protocol_version = 'HTTP/1.1'\n    def log_message(self, *a): pass\n    def do_GET(self):\n"
    "        self.send_response(200)\n        self.send_header('Content-Length', '5')\n"
    "        self.send_header('Set-Cookie', 'a=b')\n        self.end_headers()\n        self.wfile.write(b'hello')\n"
    "httpd = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)\nport = httpd.server_port\n"
    "threading.Thread(target=httpd.serve_forever, daemon=True).start()\n"
)
_END_CHILDREN = "End it before, start it again after the wake; a suspend needs neither."
_CLOSE_POOL = "Close the pool before a checkpoint; a suspend does not mind it."

ROWS = (
    Row(
        "ipywidgets",
        "ipywidgets: values, observers, links",
        "import ipywidgets as w\nfrom IPython.display import display\na, b, n = w.IntSlider(3), w.IntText(), []\n"
        "link = w.jslink((a, 'value'), (b, 'value'))\na.observe(lambda c: n.append(c.new), 'value')\ndisplay(a)",
        "a.value = 5\na.value = 6\nlast = n[-2:]\na.value = 3\nseen = [last, a.comm is not None, a.model_id]",
        "ipywidgets",
    ),
    Row(
        "tqdm",
        "tqdm: bars half-way, in text and as widgets",
        "import tqdm, tqdm.notebook\nbars = [tqdm.tqdm(total=100), tqdm.notebook.tqdm(total=50)]\n[b.update(7) for b in bars]",
        "[b.update(1) for b in bars]\n[b.update(-1) for b in bars]\nseen = [(b.n, b.total) for b in bars]",
        "tqdm ipywidgets",
    ),
    Row(
        "display",
        "displays that are updated later, results (Out, _)",
        "from IPython.display import display\nh = display('one', display_id=True)\nkept = [1, 2]\nOut[1000] = kept",
        "h.update('two')\nseen = [h.display_id, Out[1000] is kept]",
    ),
    Row(
        "autoreload",
        "%autoreload: modules that are edited",
        "import pathlib, sys\nsys.path.insert(0, '.')\npathlib.Path('mine.py').write_text('x = 1\\n')\n"
        "%load_ext autoreload\n%autoreload 2\nimport mine\nn = [1]",
        "n[0] += 1\npathlib.Path('mine.py').write_text(f'x = {n[0]}' + '\\n' + '#' * n[0])\n"
        "get_ipython().run_line_magic('autoreload', 'now')\nseen = [mine.x == n[0]]",
    ),
    Row(
        "debugger",
        "debugpy, listening for an editor",
        "import debugpy, json, socket, struct\nat = debugpy.listen(('127.0.0.1', 0))\n"
        "def ask(file, command, **arguments):\n    text = json.dumps(dict(seq=1, type='request', command=command, arguments=arguments)).encode()\n"
        "    file.write(b'Content-Length: %d\\r\\n\\r\\n' % len(text) + text)\n    file.flush()\n    while True:\n"
        "        length = int(file.readline().split()[1])\n        file.readline()\n        answer = json.loads(file.read(length))\n"
        "        if answer.get('command') == command: return answer['success']",
        # Of a client that connects just as the last one's session ends, debugpy 1.8.22 never hears; nor of any other then.
        "import time\ntime.sleep(0.5)\nwith socket.create_connection(at, 20) as editor, editor.makefile('rwb') as file:\n"
        "    editor.settimeout(30)\n    editor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))  # no TIME_WAIT\n"
        "    seen = [ask(file, 'initialize', adapterID='x'), ask(file, 'disconnect')]\n    while file.read(1000): pass",
        "debugpy",
        "Turn the debugger off (the bug button) before the kernel is to sleep; restart it after debugpy.listen().",
    ),
    Row(
        "threads",
        "threads: ThreadPoolExecutor, queues, timers",
        "import concurrent.futures, queue, threading, time\npool = concurrent.futures.ThreadPoolExecutor(4)\n"
        "q, n = queue.Queue(), [0]\ndef work():\n    while True:\n        n[0] += q.get()\n        q.task_done()\n"
        "threading.Thread(target=work, daemon=True).start()\ntimer = threading.Timer(100000, print)\ntimer.start()",
        "before = n[0]\nq.put(1)\nq.join()\nseen = [list(pool.map(abs, [-1, -2])), n[0] - before, timer.is_alive()]",
    ),
    Row(
        "asyncio",
        "asyncio: tasks that run on between cells",
        "import asyncio\nn, q = [0], asyncio.Queue()\nasync def tick():\n    while True:\n        n[0] += 1\n"
        "        await asyncio.sleep(0.01)\nasync def wait(): return await q.get()\n"
        "task, waiting = asyncio.create_task(tick()), asyncio.create_task(wait())",
        "before = n[0]\nawait asyncio.sleep(0.2)\nseen = [n[0] > before, task.done(), waiting.done()]",
    ),
    Row(
        "requests",
        "requests: a session with an open connection",
        _SERVER + "import requests\ns = requests.Session()\ns.trust_env = False\n"
        "s.get(f'http://127.0.0.1:{port}/', timeout=60).text",
        "seen = [s.get(f'http://127.0.0.1:{port}/', timeout=60).text, s.cookies.get_dict()]",
        "requests",
    ),
    Row(
        "httpx",
        "httpx: a client with an open connection",
        _SERVER + "import httpx\nc = httpx.Client(trust_env=False)\nc.get(f'http://127.0.0.1:{port}/').text",
        "seen = [c.get(f'http://127.0.0.1:{port}/', timeout=60).text, dict(c.cookies)]",
        "httpx",
    ),
    Row(
        "aiohttp",
        "aiohttp: a client session",
        "import aiohttp\ns = aiohttp.ClientSession(headers={'X': '1'})",
        "seen = [s.closed, s.headers['X']]",
        "aiohttp",
    ),
    Row(
        "flask",
        "a web application in a thread (Flask)",
        "import flask, threading, urllib.request, werkzeug.serving\napp = flask.Flask('row')\n"
        "@app.route('/')\ndef index(): return 'hello'\n"
        "server = werkzeug.serving.make_server('127.0.0.1', 0, app, threaded=True)\n"
        "threading.Thread(target=server.serve_forever, daemon=True).start()\n"
        "opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))",
        "seen = [opener.open(f'http://127.0.0.1:{server.server_port}/', timeout=60).read().decode()]",
        "flask",
    ),
    Row(
        "commands",
        "commands that have ended (!ls, subprocess.run)",
        "import subprocess\nfiles = !echo one; echo two\ndone = subprocess.run(['true'])",
        "again = !echo three\nseen = [list(files), done.returncode, list(again), subprocess.run(['false']).returncode]",
    ),
    Row(
        "popen",
        "a command that runs and answers over pipes (subprocess.Popen)",
        "import subprocess\ncat = subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "def ask(word):\n    cat.stdin.write(word + b'\\n')\n    cat.stdin.flush()\n    return cat.stdout.readline().decode()",
        "seen = [ask(b'hello'), cat.poll()]",
        instead=_END_CHILDREN,
    ),
    Row(
        "server",
        "a server that listens, as a command (python -m http.server)",
        "import subprocess, sys, socket, time, urllib.request\nwith socket.socket() as p:\n    p.bind(('127.0.0.1', 0))\n"
        "    port = p.getsockname()[1]\nopen('index.html', 'w').write('hello')\n"
        "server = subprocess.Popen([sys.executable, '-m', 'http.server', '--bind', '127.0.0.1', str(port)], "
        "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))\n"
        "def get():\n    for _ in range(100):\n        try:\n            return opener.open(f'http://127.0.0.1:{port}/', timeout=60).read().decode()\n"
        "        except OSError:\n            time.sleep(0.2)\nget()",
        "seen = [get(), server.poll()]",
        instead=_END_CHILDREN,
    ),
    Row(
        "bash-bg",
        "%%bash --bg",
        "get_ipython().run_cell_magic('bash', '--bg --proc job', 'while true; do date >> beat; sleep 0.1; done')\n"
        "import os, time\ndef size(): return os.path.getsize('beat') if os.path.exists('beat') else 0",
        "before, until = size(), time.time() + 20\nwhile size() <= before and time.time() < until: time.sleep(0.05)\n"
        "seen = [size() > before, job.returncode]",
        instead=_END_CHILDREN,
    ),
    Row(
        "pty",
        "a shell in a pseudo-terminal (pexpect)",
        "import pexpect\nsh = pexpect.spawn('sh', encoding='utf8', echo=False)\nsh.sendline('x=41; echo ready$x')\n"
        "sh.expect('ready41')",
        "sh.sendline('echo got$((x + 1))')\nsh.expect('got42', timeout=60)\nseen = [sh.isalive()]",
        "pexpect",
    ),
    Row(
        "tensorboard",
        "TensorBoard beside the notebook (%tensorboard)",
        "%load_ext tensorboard\n%tensorboard --logdir . --port 0\nfrom tensorboard import notebook, manager",
        "from tensorboard import manager\nimport os\n"
        "seen = [bool(manager.get_all()), all(os.path.exists(f'/proc/{i.pid}') for i in manager.get_all())]",
        "tensorboard setuptools",
        _END_CHILDREN,
    ),
    Row(
        "mp-fork",
        "multiprocessing: a pool (fork)",
        "import multiprocessing\npool = multiprocessing.get_context('fork').Pool(2)\npool.map(abs, [-1])",
        "seen = pool.map_async(abs, [-1, -2, -3]).get(20)",
        instead=_CLOSE_POOL,
    ),
    Row(
        "mp-spawn",
        "multiprocessing: a pool (spawn)",
        "import multiprocessing\npool = multiprocessing.get_context('spawn').Pool(2)\npool.map(abs, [-1])",
        "seen = pool.map_async(abs, [-1, -2, -3]).get(20)",
        instead=_CLOSE_POOL,
    ),
    Row(
        "mp-forkserver",
        "multiprocessing: a pool (forkserver)",
        "import multiprocessing\npool = multiprocessing.get_context('forkserver').Pool(2)\npool.map(abs, [-1])",
        "seen = pool.map_async(abs, [-1, -2, -3]).get(20)",
        instead=_CLOSE_POOL,
    ),
    Row(
        "mp-ended",
        "multiprocessing: pools that have been closed",
        "import multiprocessing\nwith multiprocessing.get_context('fork').Pool(2) as pool:\n    done = pool.map(abs, [-1, -2])\npool.join()",
        "seen = done",
    ),
    Row(
        "mp-values",
        "multiprocessing: locks, events, queues without processes",
        "import multiprocessing\nc = multiprocessing.get_context('fork')\nlock, event, q = c.Lock(), c.Event(), c.Queue()\n"
        "event.set()\nq.put('waiting')",
        "word = q.get(timeout=60)\nq.put(word)\nseen = [word, event.is_set(), lock.acquire(timeout=1), lock.release()]",
        instead="Delete them before a checkpoint.",
    ),
    Row(
        "executor",
        "ProcessPoolExecutor",
        "import concurrent.futures, multiprocessing\n"
        "pool = concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context('fork'))\nlist(pool.map(abs, [-1]))",
        "seen = list(pool.map(abs, [-1, -2, -3], timeout=60))",
        instead=_CLOSE_POOL,
    ),
    Row(
        "shared-memory",
        "multiprocessing.shared_memory",
        "from multiprocessing import shared_memory\nm = shared_memory.SharedMemory(create=True, size=10000)\nm.buf[:4] = b'kept'",
        "other = shared_memory.SharedMemory(m.name)\nseen = [bytes(m.buf[:4]).decode(), bytes(other.buf[:4]).decode()]\nother.close()",
        instead="Copy its content (bytes(memory.buf)), then memory.close() and memory.unlink().",
    ),
    Row(
        "joblib",
        "joblib: workers that wait for more (loky)",
        "import joblib\nrun = joblib.Parallel(2)\nrun(joblib.delayed(abs)(-n) for n in range(4))",
        "seen = run(joblib.delayed(abs)(-n) for n in range(4))",
        "joblib",
        "`joblib.externals.loky.get_reusable_executor().shutdown()` before a checkpoint; a suspend does not mind them.",
    ),
    Row(
        "joblib-threads",
        "joblib: threads, a cache on the disk",
        "import joblib\nm = joblib.Memory('cache', verbose=0)\nf = m.cache(abs)\nf(-3)\nrun = joblib.Parallel(2, prefer='threads')",
        "seen = [f(-3), run(joblib.delayed(abs)(-n) for n in range(4))]",
        "joblib",
    ),
    Row(
        "dask-threads",
        "dask: threads",
        "import dask.array as da\nx = da.random.RandomState(3).normal(size=(1000, 1000), chunks=250).persist(scheduler='threads')",
        "seen = [float(x.sum().compute(scheduler='threads')), x.numblocks]",
        "dask numpy",
    ),
    Row(
        "dask-inproc",
        "dask: a cluster inside the kernel (processes=False, inproc)",
        "from dask.distributed import Client, LocalCluster\n"
        "c = Client(LocalCluster(1, threads_per_worker=2, processes=False, protocol='inproc://', dashboard_address=None))\n"
        "kept = c.submit(sum, range(100))\nkept.result()",
        "seen = [kept.result(timeout=30), c.submit(abs, -7, pure=False).result(timeout=30)]",
        "distributed",
        "Use `dask.config.set(scheduler='threads')`, or close the cluster before a checkpoint.",
    ),
    Row(
        "dask-tcp",
        "dask: a cluster of processes (tcp)",
        "from dask.distributed import Client, LocalCluster\n"
        "c = Client(LocalCluster(2, threads_per_worker=1, dashboard_address=None))\nkept = c.submit(sum, range(100))\nkept.result()",
        "seen = [kept.result(timeout=30), c.submit(abs, -7, pure=False).result(timeout=30)]",
        "distributed",
        "Close the cluster before a checkpoint, or use one inside the kernel (`processes=False`).",
    ),
    Row(
        "ray",
        "Ray",
        "import ray\nray.init(num_cpus=1, include_dashboard=False, configure_logging=False, log_to_driver=False)\n"
        "@ray.remote\ndef f(x): return x + 1\nkept = f.remote(41)\nray.get(kept, timeout=60)",
        "seen = [ray.get(kept, timeout=60), ray.get(f.remote(1), timeout=60)]",
        "ray",
        "`ray.shutdown()` before a checkpoint of an ordinary user's kernel; results that are needed are fetched with "
        "`ray.get` first. Also before a kernel is moved: Ray listens at this host's own address.",
    ),
    Row(
        "pytest",
        "pytest in a notebook",
        "import pytest, pathlib\npathlib.Path('test_mine.py').write_text('def test_one(tmp_path): assert tmp_path.exists()')\n"
        "import os\nos.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'\n"
        "run = lambda: int(pytest.main(['-q', '-p', 'no:cacheprovider', '-c', os.devnull, '--rootdir', '.', 'test_mine.py']))\nrun()",
        "seen = [run()]",
        "pytest",
    ),
    Row(
        "papermill",
        "papermill and nbclient: notebooks run by the notebook",
        "import nbformat, papermill, asyncio\nb = nbformat.v4.new_notebook()\n"
        "b.cells = [nbformat.v4.new_code_cell('x = 41', metadata={'tags': ['parameters']}), nbformat.v4.new_code_cell('x + 1')]\n"
        "b.metadata.kernelspec = {'name': 'python3', 'display_name': 'Python 3', 'language': 'python'}\n"
        "nbformat.write(b, 'in.ipynb')\nimport concurrent.futures\npool = concurrent.futures.ThreadPoolExecutor(1)\n"
        "def run(): return papermill.execute_notebook('in.ipynb', 'out.ipynb', {'x': 1}, progress_bar=False)\n"
        "done = pool.submit(run).result(90)",
        "seen = [pool.submit(run).result(90).cells[-1].outputs[0]['data']['text/plain'], len(done.cells)]",
        "papermill",
    ),
    Row(
        "signals",
        "handlers of signals, atexit, context variables",
        "import signal, contextvars, os\nn, v = [0], contextvars.ContextVar('v', default=7)\n"
        "signal.signal(signal.SIGUSR1, lambda *a: n.__setitem__(0, n[0] + 1))\nv.set(8)",
        "before = n[0]\nos.kill(os.getpid(), signal.SIGUSR1)\nseen = [n[0] - before, v.get() in (7, 8)]",
    ),
    Row(
        "zmq",
        "ZeroMQ: sockets of your own (ipc)",
        "import zmq, threading, os\nc, name = zmq.Context(), f'ipc:///tmp/row{os.getpid()}.sock'\n"
        "server, client = c.socket(zmq.REP), c.socket(zmq.REQ)\nserver.bind(name)\nclient.connect(name)\n"
        "def serve():\n    while True: server.send(server.recv().upper())\n"
        "threading.Thread(target=serve, daemon=True).start()",
        "client.send(b'hello')\nseen = [client.recv().decode() if client.poll(20000) else 'no answer']",
        "pyzmq",
    ),
    Row(
        "simpy",
        "simpy: a simulation half-way",
        "import simpy\nworld, n = simpy.Environment(), []\ndef clock():\n    while True:\n        n.append(world.now)\n"
        "        yield world.timeout(3)\nworld.process(clock())\nworld.run(until=10)",
        "a = world.now\nworld.run(until=a + 3)\nseen = [world.now - a, n[-1] - n[-2]]",
        "simpy",
    ),
)
