/* CUDA IPC: memory that another process maps, as torch.multiprocessing does with tensors that it sends.
 *
 * The driver has no handle for served memory.  The handle that this library gives out names the allocation; a process
 * that opens it gets a descriptor of the memory from the library of the process that has it, by the socket of
 * `control.h`.  For that, worker processes that Python's multiprocessing starts preload the library too; nothing is
 * served in them.  Shared memory is not swapped any more: the driver moves it.
 */
#pragma once

#include "driver.h"

/* Create a descriptor of an allocation's memory for another process; the numbers are those in its handle. */
CUresult ipc_export(unsigned long long process, unsigned long long number, int *descriptor);

/* In a worker: where the memory of the process that has started it can be had. */
#define IPC_VARIABLE "JUPYTER_GPU_CKPT_SHARED_MEMORY_SOCKET"
void ipc_set_socket(const char *path);

/* Forget what is mapped, in a child that was just forked. */
void ipc_in_child(void);
