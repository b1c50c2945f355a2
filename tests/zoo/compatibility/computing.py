"""Rows about computing: torch, JAX, numba, models; those that need a GPU at the end."""

from __future__ import annotations

from .row import Row

_LOADER = (
    "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\ntorch.set_num_threads(1)\n"
    "data = TensorDataset(torch.arange(4000))\n"
    "loader = DataLoader(data, batch_size=4, shuffle=False, {options})\nit, n = iter(loader), [1]\nnext(it)"
)
_NEXT = "batch = next(it)[0].tolist()\nfirst = batch[0] == 4 * n[0]\nn[0] += 1\nseen = [first, len(batch)]"
_NO_WORKERS = (
    "Finish the epoch (without `persistent_workers`), or `del` the iterator, before a checkpoint; a suspend does not "
    "mind workers."
)
_NET = (
    "import torch\ntorch.manual_seed(3)\ndev = '{device}'\n"
    "net = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 1)).to(dev)\n"
    "opt = torch.optim.Adam(net.parameters())\ndef step():\n    opt.zero_grad()\n"
    "    loss = net(torch.ones(8, 20, device=dev)).pow(2).mean()\n    loss.backward()\n    opt.step()\n    return loss.item()\n"
    "[step() for _ in range(3)]\n"
)
_JAX = (
    "import jax, jax.numpy as jnp\nkey = jax.random.key(7)\nf = jax.jit(lambda x: (x @ x.T).sum())\n"
    "x = jax.random.normal(key, (200, 200))\nf(x)"
)
_JAX_SEEN = "seen = [float(f(x)), float(jax.random.normal(key)), jax.devices()[0].platform]"
_JAX_AS_NEEDED = "import os\nos.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'false'\n"
_JAX_WHOLE = (
    "import os, subprocess\nsmi = ['nvidia-smi', '--query-gpu=memory.total', '--format=csv,noheader,nounits']\n"
    "total = int(subprocess.run(smi, capture_output=True, text=True).stdout.split()[0])\n"
    "os.environ['XLA_PYTHON_CLIENT_MEM_FRACTION'] = str(4096 / total)\n"
)
_LARGE = "import torch\ntorch.manual_seed(2)\nkept = [torch.rand(16 << 20, device='cuda') for _ in range(8)]"
_LARGE_SEEN = "seen = [float(t.double().sum()) for t in kept] + [float((kept[0] * 2).double().sum())]"
_TRITON = (
    "import triton, triton.language as tl\n@triton.jit\ndef twice(x, y, n, SIZE: tl.constexpr):\n"
    "    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)\n"
    "    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)\n"
)
_WORKER = (
    "import torch\ndef work(far):\n    kept = torch.arange(1000., device='cuda')\n"
    "    while True: far.send(float((kept * far.recv()).sum()))\n"
)
_TRANSFORMER = (
    "import torch, transformers\ntorch.manual_seed(0)\n"
    "cfg = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=64)\n"
    "net = transformers.GPT2LMHeadModel(cfg).eval().to('{device}')\n"
    "ids = torch.arange(5, device='{device}')[None]\ntorch.set_grad_enabled(False)\ncache = net(ids, use_cache=True).past_key_values"
)
_TRANSFORMER_SEEN = (
    "import copy\nout = net(ids[:, -1:], past_key_values=copy.deepcopy(cache))\n"
    "seen = [net.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0).tolist(), float(out.logits.sum())]"
)
_COMPILE = (
    "import torch\nn = torch.nn.Linear(8, 8).to('{device}')\ntorch.manual_seed(0)\n"
    "f = torch.compile(lambda x: torch.sin(n(x)).sum() * 2)\nx = torch.ones(4, 8, device='{device}')\nf(x)"
)
_COMPILE_SEEN = (
    "g = torch.compile(lambda x: torch.cos(n(x)).sum())\n"
    "seen = [abs(f(x).item() - (torch.sin(n(x)).sum() * 2).item()) < 1e-4, abs(g(x).item() - torch.cos(n(x)).sum().item()) < 1e-4]"
)
_COMPILE_INSTEAD = (
    "`torch._inductor.async_compile.shutdown_compile_workers()` before a checkpoint; what is compiled stays, and the "
    "workers come back by themselves."
)

ROWS = (
    Row(
        "torch-training",
        "torch: a training loop in a thread, on the CPU",
        _NET.format(device="cpu") + "import threading, time\nn, stop = [0], threading.Event()\ndef train():\n"
        "    while not stop.is_set():\n        step()\n        n[0] += 1\n        time.sleep(0.005)\n"
        "threading.Thread(target=train, daemon=True).start()",
        "before, until = n[0], time.time() + 20\nwhile n[0] < before + 3 and time.time() < until: time.sleep(0.01)\n"
        "seen = [n[0] > before, float(next(net.parameters()).isfinite().all())]",
        "torch",
    ),
    Row(
        "torch-state",
        "torch: model, optimizer, gradients, generator, on the CPU",
        _NET.format(device="cpu") + "rng = torch.Generator().manual_seed(5)\ntorch.randn(3, generator=rng)",
        "flat = torch.cat([p.detach().flatten() for p in net.parameters()])\n"
        "grads = torch.cat([p.grad.flatten() for p in net.parameters()])\n"
        "seen = [float(flat.sum()), float(grads.sum()), len(opt.state), rng.get_state().sum().item()]",
        "torch",
    ),
    Row(
        "loader-0",
        "DataLoader: no workers, in the middle of an epoch",
        _LOADER.format(options="num_workers=0"),
        _NEXT,
        "torch",
    ),
    Row(
        "loader-fork",
        "DataLoader: workers (fork), in the middle of an epoch",
        _LOADER.format(options="num_workers=2"),
        _NEXT,
        "torch",
        _NO_WORKERS,
    ),
    Row(
        "loader-persistent",
        "DataLoader: persistent workers, in the middle of an epoch",
        _LOADER.format(options="num_workers=2, persistent_workers=True"),
        _NEXT,
        "torch",
        _NO_WORKERS,
    ),
    Row(
        "loader-spawn",
        "DataLoader: workers (spawn), in the middle of an epoch",
        _LOADER.format(options="num_workers=1, multiprocessing_context='spawn'"),
        _NEXT,
        "torch",
        _NO_WORKERS,
    ),
    Row(
        "loader-ended",
        "DataLoader: workers, after the epoch",
        "import torch\nfrom torch.utils.data import DataLoader\n"
        "done = [b.sum().item() for b in DataLoader(torch.arange(40), batch_size=10, num_workers=2)]",
        "seen = done",
        "torch",
    ),
    Row(
        "torch-shared",
        "torch: tensors in shared memory (share_memory_)",
        "import torch\nt = torch.arange(1000).share_memory_()",
        "seen = [t.is_shared(), int(t.sum())]",
        "torch",
        "Use a copy: `tensor.clone()`.",
    ),
    Row(
        "torch-compile",
        "torch.compile, on the CPU",
        _COMPILE.format(device="cpu"),
        _COMPILE_SEEN,
        "torch",
        _COMPILE_INSTEAD,
    ),
    Row(
        "torch-profiler",
        "torch.profiler used before, on the CPU",
        "import torch\nwith torch.profiler.profile() as p: torch.ones(50, 50) @ torch.ones(50, 50)",
        "seen = [len(p.key_averages()) > 0, float((torch.ones(50, 50) @ torch.ones(50, 50)).sum())]",
        "torch",
    ),
    Row(
        "summary-writer",
        "torch.utils.tensorboard: a SummaryWriter",
        "from torch.utils.tensorboard import SummaryWriter\nw = SummaryWriter('runs')\nw.add_scalar('a', 1, 0)",
        "import os\nw.add_scalar('a', 2, 1)\nw.flush()\nseen = [len(os.listdir('runs'))]",
        "torch tensorboard",
    ),
    Row(
        "transformers",
        "transformers: a model with its KV cache, on the CPU",
        _TRANSFORMER.format(device="cpu"),
        _TRANSFORMER_SEEN,
        "transformers torch",
    ),
    Row(
        "lightning",
        "Lightning: a trainer after fit, on the CPU",
        "import torch, lightning as L\nclass M(L.LightningModule):\n    def __init__(self):\n        super().__init__()\n"
        "        self.l = torch.nn.Linear(4, 1)\n    def training_step(self, b, i): return self.l(b[0]).pow(2).mean()\n"
        "    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)\nL.seed_everything(1)\nm = M()\n"
        "data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(32, 4)), 8)\n"
        "t = L.Trainer(max_epochs=2, accelerator='cpu', logger=False, enable_checkpointing=False, enable_progress_bar=False)\nt.fit(m, data)",
        "seen = [t.global_step, t.current_epoch, float(m.l.weight.sum())]",
        "lightning torch",
    ),
    Row(
        "distributed",
        "torch.distributed: a process group (gloo, one rank)",
        "import socket, torch, torch.distributed as dist\nwith socket.socket() as free:\n    free.bind(('127.0.0.1', 0))\n"
        "    port = free.getsockname()[1]\n"
        "dist.init_process_group('gloo', init_method=f'tcp://127.0.0.1:{port}', rank=0, world_size=1)\n"
        "store, x = dist.distributed_c10d._get_default_store(), torch.ones(8)\nstore.set('k', 'v')\ndist.all_reduce(x)",
        "dist.all_reduce(x)\nseen = [float(x.sum()), store.get('k').decode()]",
        "torch",
        "Destroy the process group before a checkpoint (`dist.destroy_process_group()`).",
    ),
    Row(
        "launcher",
        "accelerate: notebook_launcher, two processes that have ended, and once more",
        "import socket, accelerate, torch\n"
        "def train():\n    a = accelerate.Accelerator(cpu=True)\n    total = a.reduce(torch.ones(1) * (a.process_index + 1))\n"
        "    if a.is_main_process: open('total', 'w').write(str(total.item()))\n"
        "def launch():\n    with socket.socket() as free:\n        free.bind(('127.0.0.1', 0))\n        port = free.getsockname()[1]\n"
        "    accelerate.notebook_launcher(train, num_processes=2, use_port=str(port))\nlaunch()",
        "launch()\nseen = [open('total').read()]",
        "accelerate torch",
    ),
    Row("jax", "JAX, on the CPU", "import os\nos.environ['JAX_PLATFORMS'] = 'cpu'\n" + _JAX, _JAX_SEEN, "jax"),
    Row(
        "numba",
        "numba: compiled functions, parallel threads",
        "import numba, numpy as np\n@numba.njit(parallel=True)\ndef f(x):\n    s = 0.0\n    for i in numba.prange(len(x)): s += x[i]\n"
        "    return s\nx = np.arange(100000.)\nf(x)",
        "@numba.njit\ndef g(n): return n * 2\nseen = [f(x), g(21)]",
        "numba",
    ),
    Row(
        "gpu-torch",
        "torch: model, optimizer, gradients, on the GPU",
        _NET.format(device="cuda"),
        "flat = torch.cat([p.detach().flatten() for p in net.parameters()])\nseen = [float(flat.sum()), len(opt.state)]",
        "torch",
        gpu=True,
    ),
    Row(
        "gpu-graph",
        "torch: autocast and a CUDA graph",
        "import torch\nx = torch.ones(64, 64, device='cuda')\ny = torch.zeros_like(x)\ntorch.cuda.synchronize()\n"
        "g = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g): y.copy_(x * 2)\n"
        "with torch.autocast('cuda'): z = (x @ x).float()",
        "y.zero_()\ng.replay()\ntorch.cuda.synchronize()\nseen = [float(y.sum()), float(z.sum())]",
        "torch",
        gpu=True,
    ),
    Row(
        "gpu-stream",
        "torch: streams, pinned memory, a thread that computes",
        "import torch, threading\ns = torch.cuda.Stream()\np = torch.arange(1000).pin_memory()\nn = [0]\n"
        "def work():\n    while True:\n        with torch.cuda.stream(s): (torch.ones(256, 256, device='cuda') ** 2).sum().item()\n"
        "        n[0] += 1\nthreading.Thread(target=work, daemon=True).start()",
        "import time\na = n[0]\ntime.sleep(1)\nseen = [n[0] > a, int(p.to('cuda', non_blocking=True).sum()), p.is_pinned()]",
        "torch",
        gpu=True,
    ),
    Row(
        "gpu-compile",
        "torch.compile, on the GPU",
        _COMPILE.format(device="cuda"),
        _COMPILE_SEEN,
        "torch",
        _COMPILE_INSTEAD,
        True,
    ),
    Row(
        "gpu-loader",
        "DataLoader: workers and pinned memory",
        "import torch\nw = torch.ones(4, device='cuda')\n" + _LOADER.format(options="num_workers=2, pin_memory=True"),
        _NEXT,
        "torch",
        _NO_WORKERS,
        True,
    ),
    Row(
        "gpu-transformers",
        "transformers: a model with its KV cache, on the GPU",
        _TRANSFORMER.format(device="cuda"),
        _TRANSFORMER_SEEN,
        "transformers torch",
        gpu=True,
    ),
    Row(
        "gpu-scaler",
        "torch: mixed precision, a training loop in a thread",
        "import torch, threading, time\ntorch.manual_seed(3)\nnet = torch.nn.Linear(64, 64, device='cuda')\n"
        "opt, scaler, n = torch.optim.AdamW(net.parameters()), torch.amp.GradScaler('cuda'), [0]\n"
        "def train():\n    while True:\n"
        "        with torch.autocast('cuda', torch.float16): loss = net(torch.ones(8, 64, device='cuda')).pow(2).mean()\n"
        "        opt.zero_grad()\n        scaler.scale(loss).backward()\n        scaler.step(opt)\n        scaler.update()\n"
        "        n[0] += 1\nthreading.Thread(target=train, daemon=True).start()",
        "before, until = n[0], time.time() + 30\nwhile n[0] < before + 5 and time.time() < until: time.sleep(0.01)\n"
        "seen = [n[0] > before, all(bool(p.isfinite().all()) for p in net.parameters())]",
        "torch",
        gpu=True,
    ),
    Row(
        "gpu-expandable",
        "torch: expandable segments (PYTORCH_CUDA_ALLOC_CONF)",
        "import os\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'\n" + _LARGE,
        _LARGE_SEEN,
        "torch",
        gpu=True,
    ),
    Row(
        "gpu-async",
        "torch: the driver's pools (backend:cudaMallocAsync)",
        "import os\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'backend:cudaMallocAsync'\n" + _LARGE,
        _LARGE_SEEN,
        "torch",
        gpu=True,
    ),
    Row(
        "gpu-lightning",
        "Lightning: a trainer after fit, on the GPU",
        "import torch, lightning as L\nfrom lightning.fabric.plugins.environments import LightningEnvironment\n"
        "torch.manual_seed(1)\nclass M(L.LightningModule):\n    def __init__(self):\n        super().__init__()\n        self.l = torch.nn.Linear(4, 1)\n"
        "    def training_step(self, b, i): return self.l(b[0]).pow(2).mean()\n"
        "    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)\n"
        "data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(16, 4)), 4)\nm = M()\n"
        # Where mpi4py is installed, Lightning would ask MPI, which starts a daemon, and ends a kernel that may not.
        "t = L.Trainer(max_epochs=2, accelerator='gpu', devices=1, logger=False, enable_checkpointing=False,\n"
        "    enable_progress_bar=False, plugins=[LightningEnvironment()])\nt.fit(m, data)\nm.to('cuda')",
        "seen = [t.global_step, t.current_epoch, float(m.l.weight.sum())]",
        "lightning torch",
        gpu=True,
    ),
    Row(
        "gpu-accelerate",
        "accelerate: a prepared model and optimizer",
        "import torch, accelerate\ntorch.manual_seed(1)\na, l = accelerate.Accelerator(), torch.nn.Linear(4, 1)\n"
        "m, o = a.prepare(l, torch.optim.SGD(l.parameters(), 0.1))\n"
        "def step():\n    o.zero_grad()\n    a.backward(m(torch.ones(2, 4, device=a.device)).pow(2).mean())\n    o.step()\n"
        "step()",
        "seen = [float(m.weight.sum()), str(a.device)]",
        "accelerate torch",
        gpu=True,
    ),
    Row(
        "gpu-triton",
        "Triton: a kernel of your own",
        f"import os, sys, torch, pathlib\npathlib.Path('mine_triton.py').write_text({_TRITON!r})\n"
        "sys.path.insert(0, os.getcwd())\nimport mine_triton\nx = torch.arange(1000., device='cuda')\ny = torch.empty_like(x)",
        "mine_triton.twice[(4,)](x, y, 1000, SIZE=256)\ntorch.cuda.synchronize()\nseen = [float(y.sum())]",
        "torch triton",
        gpu=True,
    ),
    Row(
        "gpu-worker",
        "a worker process with CUDA of its own (spawn), over a pipe",
        f"import os, sys, pathlib, multiprocessing as mp\npathlib.Path('mine_worker.py').write_text({_WORKER!r})\n"
        "sys.path.insert(0, os.getcwd())\nimport mine_worker, torch\nown = torch.ones(8, device='cuda')\n"
        "near, far = mp.get_context('spawn').Pipe()\n"
        "p = mp.get_context('spawn').Process(target=mine_worker.work, args=(far,), daemon=True)\np.start()",
        "near.send(2)\nseen = [near.recv() if near.poll(60) else None, float(own.sum())]",
        "torch",
        "End the worker before, start it again after the wake.",
        True,
    ),
    Row(
        "gpu-inherited",
        "a forked child beside CUDA (multiprocessing, os.fork)",
        "import os, torch\nx = torch.ones(8, device='cuda')\nr, w = os.pipe()\nr2, w2 = os.pipe()\npid = os.fork()\n"
        "if pid == 0:\n    while True: os.write(w2, os.read(r, 1))",
        "n = os.write(w, b'a')\nseen = [os.read(r2, 1).decode(), float(x.sum())]",
        "torch",
        "End the child before a checkpoint; a suspend does not mind it.",
        True,
    ),
    Row(
        "gpu-managed",
        "CuPy: managed memory",
        "import cupy as cp\ncp.cuda.set_allocator(cp.cuda.MemoryPool(cp.cuda.malloc_managed).malloc)\n"
        "x = cp.arange(1 << 20, dtype='f4')",
        "seen = [float(x.sum())]",
        "cupy-cuda13x",
        "Use CuPy's ordinary pool: `cupy.cuda.set_allocator(cupy.cuda.MemoryPool().malloc)`.",
        True,
    ),
    Row(
        "gpu-watched",
        "nvidia-smi and pynvml, looked at in between",
        "import subprocess, pynvml, torch\npynvml.nvmlInit()\ng = pynvml.nvmlDeviceGetHandleByIndex(0)\n"
        "x = torch.ones(1 << 20, device='cuda')",
        "smi = subprocess.run(['nvidia-smi', '-L'], capture_output=True, text=True).stdout.startswith('GPU 0')\n"
        "seen = [smi, pynvml.nvmlDeviceGetMemoryInfo(g).used > 0, float(x.sum())]",
        "nvidia-ml-py torch",
        gpu=True,
    ),
    Row(
        "gpu-persistent",
        "DataLoader: persistent workers (fork) beside CUDA, in the middle of an epoch",
        "import torch\nw = torch.ones(4, device='cuda')\n"
        + _LOADER.format(options="num_workers=2, persistent_workers=True"),
        _NEXT + " + [float(w.sum())]",
        "torch",
        gpu=True,
    ),
    Row(
        "gpu-joblib",
        "joblib workers (loky) and a background command beside CUDA",
        "import subprocess, torch\nfrom joblib import Parallel, delayed\nx = torch.ones(1 << 20, device='cuda')\n"
        "r = Parallel(2)(delayed(abs)(-n) for n in range(4))\n"
        "p = subprocess.Popen(['sed', '-u', 's/a/b/'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)",
        "p.stdin.write(b'a\\n')\np.stdin.flush()\n"
        "seen = [Parallel(2)(delayed(abs)(-n) for n in range(4)), p.stdout.readline().decode(), float(x.sum())]",
        "joblib torch",
        gpu=True,
    ),
    Row(
        "gpu-pool",
        "multiprocessing: a pool (fork), started beside CUDA",
        "import multiprocessing, torch\nx = torch.ones(1 << 20, device='cuda')\n"
        "pool = multiprocessing.get_context('fork').Pool(2)\npool.map(abs, [-1])",
        "seen = [pool.map_async(abs, [-1, -2, -3]).get(60), float(x.sum())]",
        "torch",
        gpu=True,
    ),
    Row(
        "gpu-nccl",
        "NCCL in one process (torch.distributed, one rank)",
        "import os, socket, torch, torch.distributed as dist\nwith socket.socket() as free:\n    free.bind(('127.0.0.1', 0))\n"
        "    port = free.getsockname()[1]\n"
        "dist.init_process_group('nccl', init_method=f'tcp://127.0.0.1:{port}', rank=0, world_size=1)\n"
        "x = torch.ones(1 << 20, device='cuda')\ndist.all_reduce(x)\ntorch.cuda.synchronize()",
        "dist.all_reduce(x)\ntorch.cuda.synchronize()\nseen = [float(x.sum())]",
        "torch",
        "Destroy the process group before a checkpoint (`dist.destroy_process_group()`); a suspend does not mind it.",
        True,
    ),
    Row("gpu-jax", "JAX, with memory as needed", _JAX_AS_NEEDED + _JAX, _JAX_SEEN, "jax", gpu=True),
    Row("gpu-jax-whole", "JAX, preallocating 4 GiB", _JAX_WHOLE + _JAX, _JAX_SEEN, "jax", gpu=True),
    Row(
        "gpu-cupy",
        "CuPy: arrays, its pools, a kernel of your own",
        "import cupy as cp\nx = cp.arange(100000, dtype='f4')\nk = cp.ElementwiseKernel('float32 a', 'float32 b', 'b = a * 2', 'twice')\nk(x)",
        "seen = [float(k(x).sum()), float(x.sum())]",
        "cupy-cuda13x",
        gpu=True,
    ),
    Row(
        "gpu-profiler",
        "torch.profiler used before, on the GPU",
        "import torch\nwith torch.profiler.profile() as p: (torch.ones(50, 50, device='cuda') @ torch.ones(50, 50, device='cuda')).sum().item()",
        "seen = [len(p.key_averages()) > 0, float(torch.ones(50, device='cuda').sum())]",
        "torch",
        "Profile in a kernel of its own: once CUPTI was used, the driver does not lock the process any more; a suspend works.",
        True,
    ),
)
