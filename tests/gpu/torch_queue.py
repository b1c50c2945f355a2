"""Tensors of the GPU that go through queues of torch.multiprocessing, to a worker and back; prints what arrived."""

from __future__ import annotations

import torch
import torch.multiprocessing


def work(to: torch.multiprocessing.Queue, back: torch.multiprocessing.Queue) -> None:
    """Add up what was sent, change it, and send other memory back, until None comes."""
    kept = []
    while (sent := to.get()) is not None:
        total = float(sent.double().sum())
        sent.mul_(2)
        kept.append(torch.full((3 << 20,), total % 1000, device="cuda"))
        torch.cuda.synchronize()
        back.put((total, kept[-1]))
        del sent
    back.put("done")
    to.get()  # what it has sent must live until it was received


def main() -> None:
    torch.manual_seed(0)
    context = torch.multiprocessing.get_context("spawn")
    to, back = context.Queue(), context.Queue()
    worker = context.Process(target=work, args=(to, back))
    tensors = [torch.randn(size, device="cuda") for size in (10, 1 << 20, 5 << 20)]
    tensors.append(tensors[2][1 << 20 : 2 << 20])
    model = torch.nn.Linear(2048, 2048).cuda()
    tensors.append(model.weight.detach())
    worker.start()
    for tensor in tensors:
        to.put(tensor)
        total, sent_back = back.get(timeout=120)
        print(total, float(tensor.double().sum()), float(sent_back.double().sum()))
        del sent_back
    to.put(None)
    print(back.get(timeout=120))
    to.put(None)
    worker.join()
    print(worker.exitcode)


if __name__ == "__main__":
    main()
