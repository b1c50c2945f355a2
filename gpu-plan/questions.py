"""Questions to a real driver; prints a line for each answer.  Needs root's or the user's own processes, one GPU, CUDA >= 12.8.

python questions.py LIBRARY.so TREE   (TREE: the tree whose tests/support has zero_scan.py)
"""
import ctypes, os, signal, subprocess, sys, time
sys.path.insert(0, sys.argv[2] + "/tests/support")
from pathlib import Path

CALLS = ["cuStreamQuery", "cuEventQuery", "cuEventSynchronize", "cuCtxSynchronize", "cuStreamSynchronize", "cuStreamIsCapturing",
         "cuStreamGetCtx", "cuCtxGetDevice", "cuMemPoolGetAttribute", "cuMemGetInfo_v2", "cuPointerGetAttribute", "cuMemFree_v2",
         "cuMemFreeAsync", "cuEventCreate"]
CHILD = r"""
import ctypes, sys, threading, time
cu, P, U = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p, ctypes.c_ulonglong
ctx, s, e, a, b, pool, out = P(), P(), P(), U(), U(), P(), (U * 8)()
assert cu.cuInit(0) == cu.cuDevicePrimaryCtxRetain(ctypes.byref(ctx), 0) == cu.cuCtxSetCurrent(ctx) == 0
assert cu.cuStreamCreate(ctypes.byref(s), 1) == cu.cuEventCreate(ctypes.byref(e), 2) == cu.cuEventRecord(e, s) == 0
assert cu.cuMemAlloc_v2(ctypes.byref(a), ctypes.c_size_t(4 << 20)) == cu.cuMemAllocAsync(ctypes.byref(b), ctypes.c_size_t(4 << 20), s) == 0
assert cu.cuDeviceGetDefaultMemPool(ctypes.byref(pool), 0) == cu.cuCtxSynchronize() == 0
arguments = {"cuStreamQuery": (s,), "cuEventQuery": (e,), "cuEventSynchronize": (e,), "cuCtxSynchronize": (), "cuStreamSynchronize": (s,),
  "cuStreamIsCapturing": (s, out), "cuStreamGetCtx": (s, out), "cuCtxGetDevice": (out,), "cuMemPoolGetAttribute": (pool, 5, out),
  "cuMemGetInfo_v2": (out, ctypes.byref(out, 8)), "cuPointerGetAttribute": (out, 1, a), "cuMemFree_v2": (a,), "cuMemFreeAsync": (b, s),
  "cuEventCreate": (out, 2)}[sys.argv[1]]
def call():
    cu.cuCtxSetCurrent(ctx)
    go.wait()
    print("returned", getattr(cu, sys.argv[1])(*arguments), flush=True)
go = threading.Event()
threading.Thread(target=call, daemon=True).start()
print("ready", flush=True)
sys.stdin.readline(); go.set(); sys.stdin.readline()
"""
cu = ctypes.CDLL("libcuda.so.1")
cu.cuInit(0)
def checkpoint(verb, pid):
    blank = ctypes.create_string_buffer(256)
    return getattr(cu, "cuCheckpointProcess" + verb)(pid, blank)
for name in CALLS:
    child = subprocess.Popen([sys.executable, "-c", CHILD, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if child.stdout.readline() != "ready\n":
        print(f"{name}: no child"); continue
    results = [checkpoint("Lock", child.pid), checkpoint("Checkpoint", child.pid)]
    print(end=f"{name}: lock and checkpoint {results}; ", flush=True)
    child.stdin.write("\n"); child.stdin.flush(); time.sleep(1.5)
    import select
    early = bool(select.select([child.stdout], [], [], 0)[0])
    if child.poll() is not None:
        print(f"ENDS the process ({child.returncode})"); continue
    said = child.stdout.readline().strip() if early else "waits"
    results = [checkpoint("Restore", child.pid), checkpoint("Unlock", child.pid)]
    time.sleep(0.5)
    late = "" if early else (child.stdout.readline().strip() if select.select([child.stdout], [], [], 5)[0] else f"never, status {child.poll()}")
    print(f"{said} while suspended; restore and unlock {results}; afterwards {late or 'alive' if child.poll() is None else child.returncode}")
    child.kill(); child.wait()
import zero_scan
for cache in ("no cache", "cache"):
    code = f"""
import sys, time; sys.path.insert(0, {sys.argv[2] + '/tests/support'!r})
import zero_scan, ctypes; from pathlib import Path
load = time.time()
d = zero_scan.Device(Path({sys.argv[1]!r}))
m = ctypes.c_void_p(); t = time.time(); d.call('cuModuleLoadData', ctypes.byref(m), zero_scan.text(Path({sys.argv[1]!r}))); print('load of the PTX again {{:.4f}} s'.format(time.time() - t))
GIB = 1 << 30
a = ctypes.c_ulonglong(); d.call('cuMemAlloc_v2', ctypes.byref(a), ctypes.c_size_t(16 * GIB))
d.call('cuMemsetD8_v2', a, 0, ctypes.c_size_t(16 * GIB)); d.call('cuCtxSynchronize')
parts = [(a.value + n * zero_scan.PART, zero_scan.PART) for n in range(4096)]
for _ in range(3):
    t = time.time(); found = d.scan(parts); print('16 GiB of zeros {{:.4f}} s'.format(time.time() - t), sum(found))
d.call('cuMemsetD8_v2', a, 7, ctypes.c_size_t(16 * GIB)); d.call('cuCtxSynchronize')
t = time.time(); found = d.scan(parts); print('16 GiB of others {{:.4f}} s'.format(time.time() - t), sum(found))
"""
    env = dict(os.environ, CUDA_CACHE_DISABLE="1") if cache == "no cache" else dict(os.environ)
    print(cache, subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60), flush=True)
