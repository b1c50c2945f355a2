"""Kernels whose child processes use the GPU: they leave it together, or none of them does."""

from __future__ import annotations

import json
import textwrap

import pytest
from harness import alive, notebook, until

from jupyter_gpu_ckpt.cuda.cuda import CudaState
from jupyter_gpu_ckpt.lifecycle import cuda_processes, host_memory
from jupyter_gpu_ckpt.lifecycle.plans import State

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

#: Bytes of one worker's tensors.
BYTES = 8 * (32 << 20)
#: Bytes of the worker that has more than its context.
WORKER_BYTES = 4 << 30
#: A module, since a spawned process imports what it runs.
WORKERS = textwrap.dedent("""
    import hashlib, os

    def answer(pipe, seed):
        import torch
        generator = torch.Generator("cuda").manual_seed(seed)
        tensors = [torch.randint(0, 256, (32 << 20,), dtype=torch.uint8, device="cuda", generator=generator)
                   for _ in range(8)]
        torch.cuda.synchronize()
        pipe.send(os.getpid())
        while (question := pipe.recv()) is not None:
            if question == "add":
                for tensor in tensors:
                    tensor.add_(1)
            pipe.send([hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest() for tensor in tensors])

    def fill(bytes):
        import os, torch
        global filled
        filled = torch.arange(bytes // 8, device="cuda")
        torch.cuda.synchronize()
        return os.getpid()

    def total(_):
        return int(filled.sum())

    class OnDevice:
        # A data set whose items a worker puts on the GPU.
        def __len__(self):
            return 64
        def __getitem__(self, index):
            import torch
            return torch.full((1 << 20,), index, device="cuda").cpu()

    def receive(queue, answers):
        tensor = queue.get()
        answers.put(float(tensor.sum()))
        queue.get()  # holds the kernel's memory until then

    def rank(number, port, pipe):
        import torch, torch.distributed as group
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.cuda.set_device(number)
        group.init_process_group("nccl", rank=number, world_size=2)
        total = torch.ones(1 << 20, device="cuda")
        group.all_reduce(total)
        torch.cuda.synchronize()
        pipe.send(total[0].item())
        pipe.recv()
""")
SETUP = """
import json, sys
import torch, torch.multiprocessing
sys.path.insert(0, {directory!r})
import gpu_workers
spawning = torch.multiprocessing.get_context("spawn")
"""
START = """
pipes, workers = [], []
for seed in (1, 2):
    ours, theirs = spawning.Pipe()
    workers.append(spawning.Process(target=gpu_workers.answer, args=(theirs, seed), daemon=True))
    workers[-1].start()
    pipes.append(ours)
pids = [pipe.recv() for pipe in pipes]

def ask(question="digest"):
    for pipe in pipes:
        pipe.send(question)
    return [pipe.recv() for pipe in pipes]
"""


@pytest.fixture
async def workers(tmp_path, runtime_base):
    pytest.importorskip("torch", reason="PyTorch is not installed on this machine")
    (tmp_path / "gpu_workers.py").write_text(WORKERS)
    async with notebook(tmp_path, runtime_base) as kernel:
        await kernel.run(SETUP.format(directory=str(tmp_path)))
        yield kernel


def using(kernel) -> dict[int, CudaState]:
    return cuda_processes.states(kernel.lifecycle.kernel)


@pytest.mark.parametrize("own", [False, True], ids=["children only", "kernel too"])
@pytest.mark.parametrize("verb", ["suspend", "checkpoint"])
async def test_workers_that_were_spawned_leave_the_gpu_and_come_back(workers, record, verb, own):
    await workers.run(START)
    if own:
        await workers.run("x = torch.arange(64 << 20, device='cuda')")
    digests = json.loads(await workers.run("print(json.dumps(ask()))"))
    for _ in range(2):
        pids = [*using(workers)]
        assert len(pids) == 2 + own
        before = sum(host_memory.device_bytes(workers.lifecycle.kernel).values())
        assert before > 2 * BYTES
        await getattr(workers.provisioner, verb)()
        record(out=workers.steps.seconds(), held_mib=before >> 20)
        if verb == "suspend":
            assert set(using(workers).values()) == {CudaState.CHECKPOINTED}
            assert host_memory.device_bytes(workers.lifecycle.kernel) == {}
        else:
            assert alive(pids) == []
        assert json.loads(await workers.run("print(json.dumps(ask()))")) == digests
        record(back=workers.steps.seconds())
        assert set(using(workers).values()) == {CudaState.RUNNING}
        if own:
            assert await workers.run("print(bool((x == torch.arange(64 << 20, device='cuda')).all()))") == "True"
    changed = json.loads(await workers.run("print(json.dumps(ask('add')))"))
    assert changed != digests, "they compute on"


@pytest.mark.parametrize("verb", ["suspend", "checkpoint"])
async def test_nearly_all_memory_of_a_spawned_worker_is_moved_by_its_library(workers, record, verb):
    await workers.run(
        "from concurrent.futures import ProcessPoolExecutor\n"
        "pool = ProcessPoolExecutor(1, mp_context=spawning)\n"
        f"worker = pool.submit(gpu_workers.fill, {WORKER_BYTES}).result()",
        240,
    )
    (pid,), state, n = using(workers), workers.lifecycle.kernel, WORKER_BYTES // 8
    assert state.fast_path(pid=pid).amounts().bytes >= 0.95 * WORKER_BYTES
    for _ in range(2):
        await workers.provisioner.suspend()
        assert state.fast_path(pid=pid).amounts().swapped_out >= 0.95 * WORKER_BYTES
        assert host_memory.device_bytes(state) == {}
        if verb == "checkpoint":
            await workers.provisioner.checkpoint()
            assert alive([pid]) == []
        assert await workers.run("print(pool.submit(gpu_workers.total, 0).result())", 240) == str(n * (n - 1) // 2)
        record(verb=verb, seconds=workers.steps.seconds())
        (pid,) = using(workers)
    await workers.run("pool.shutdown()")


@pytest.mark.parametrize("verb", ["suspend", "checkpoint"])
async def test_a_loader_of_spawned_workers_that_use_the_gpu_continues_in_the_middle_of_an_epoch(workers, verb):
    await workers.run(
        "import torch.utils.data\n"
        "loader = torch.utils.data.DataLoader(gpu_workers.OnDevice(), batch_size=4, num_workers=2,\n"
        "                                     multiprocessing_context='spawn', persistent_workers=True)\n"
        "batches = iter(loader); seen = [int(x) for x in next(batches)[:, 0]]",
        240,
    )
    await until(lambda: len(using(workers)) == 2)  # the second worker may be slower than the first one's batch
    for _ in range(2):
        await getattr(workers.provisioner, verb)()
        await workers.run("seen += [int(x) for x in next(batches)[:, 0]]", 240)
        assert len(using(workers)) == 2
    assert (
        await workers.run(
            "for batch in batches: seen += [int(x) for x in batch[:, 0]]\nprint(seen == list(range(64)))", 240
        )
        == "True"
    )
    assert await workers.run("print(sum(int(batch[:, 0].sum()) for batch in loader))", 240) == str(sum(range(64)))


async def test_a_worker_that_the_driver_refuses_keeps_all_of_them_on_the_gpu(workers, record):
    await workers.run(START)
    digests = await workers.run("print(ask())")
    managed = (
        "import ctypes; managed = ctypes.c_void_p()\n"
        "x = torch.ones(1, device='cuda')\n"
        "print(ctypes.CDLL('libcuda.so.1').cuMemAllocManaged(ctypes.byref(managed), ctypes.c_size_t(1 << 20), 1))"
    )
    assert await workers.run(managed) == "0"
    with pytest.raises(Exception, match=r"MANAGED_MEMORY|CUDA_UNSUPPORTED") as refused:
        await workers.provisioner.checkpoint()
    record(refusal=str(refused.value))
    assert workers.lifecycle.state is State.RUNNING
    assert set(using(workers).values()) == {CudaState.RUNNING}
    assert await workers.run("print(ask())") == digests


async def test_tensors_that_are_sent_to_a_worker_are_refused_by_name(workers):
    await workers.run(
        "queue, answers = spawning.Queue(), spawning.Queue()\n"
        "worker = spawning.Process(target=gpu_workers.receive, args=(queue, answers), daemon=True)\n"
        "worker.start(); x = torch.ones(1 << 22, device='cuda'); queue.put(x)"
    )
    assert await workers.run("print(answers.get())") == str(float(1 << 22))
    for verb in ("suspend", "checkpoint"):
        with pytest.raises(Exception, match=r"\[CUDA_IPC\]"):
            await getattr(workers.provisioner, verb)()
    await workers.run("queue.put(None); worker.join()")
    await workers.provisioner.checkpoint()
    assert await workers.run("print(x.sum().item())") == str(float(1 << 22))


@pytest.mark.two_gpus
async def test_ranks_that_communicate_by_nccl_are_refused_by_name(workers, record):
    start = (
        "import socket\n"
        "with socket.socket() as free: free.bind(('127.0.0.1', 0)); port = free.getsockname()[1]\n"
        "pipes = [spawning.Pipe() for _ in range(2)]\n"
        "ranks = [spawning.Process(target=gpu_workers.rank, args=(n, port, pipes[n][1]), daemon=True)"
        " for n in range(2)]\n"
        "for each in ranks: each.start()\n"
        "print([pipe.recv() for pipe, _ in pipes])"
    )
    assert await workers.run(start) == "[2.0, 2.0]"
    states = using(workers)
    assert len(states) == 2
    record(shared=[cuda_processes.amounts(workers.lifecycle.kernel, pid).shared for pid in states])
    for verb in ("suspend", "checkpoint"):
        with pytest.raises(Exception, match=r"\[NCCL_PEERS\]"):
            await getattr(workers.provisioner, verb)()
    assert using(workers) == states
    await workers.run("for pipe, _ in pipes: pipe.send(None)\nfor each in ranks: each.join()")


async def test_a_fork_of_the_kernel_that_has_inherited_device_files_continues(workers):
    await workers.run(
        "import os\nx = torch.arange(1 << 20, device='cuda')\n"
        "read, write = os.pipe()\nback, answer = os.pipe()\n"
        "if (forked := os.fork()) == 0:\n"
        "    while os.read(read, 1): os.write(answer, b'y')\n"
        "    os._exit(0)"
    )
    cuda = workers.lifecycle.engine.cuda
    (forked,) = [pid for pid in workers.lifecycle.capsule.other_processes() if cuda.device_files(pid)]
    assert forked not in using(workers)
    for verb in ("suspend", "suspend", "checkpoint", "suspend", "checkpoint"):
        await getattr(workers.provisioner, verb)()
        assert await workers.run("os.write(write, b'x'); print(os.read(back, 1), int(x.sum()))") == (
            f"b'y' {sum(range(1 << 20))}"
        )
        await workers.settled("running")
    assert await workers.run("os.kill(forked, 9); print(os.waitpid(forked, 0)[1])") == "9"
