#define _GNU_SOURCE
#include "ipc.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "allocations.h"
#include "control.h"
#include "launch_gate.h"

/* The beginning of our handles; the driver's begin otherwise. */
struct handle {
    char mark[16];
    unsigned long long process, number, bytes; /* an address may be another allocation's later */
    long long suffix;                          /* of the socket (`control.h`) */
};
static const char mark[16] = "gpu-ckpt memory";

/* -- the process that has the memory */

static unsigned long long own_process(void)
{
    static _Atomic unsigned long long chosen;
    unsigned long long none = 0, fresh = 0;
    if (chosen == 0 && getrandom(&fresh, sizeof fresh, 0) == sizeof fresh)
        atomic_compare_exchange_strong(&chosen, &none, fresh | 1);
    return chosen;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address)
{
    const struct driver *original = any_driver();
    struct allocation allocation;
    if (original == NULL || original->cuIpcGetMemHandle == NULL)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (handle == NULL || original->cuMemExportToShareableHandle == NULL ||
        !allocation_containing(address, &allocation) || allocation.pool != 0 || own_process() == 0)
        return original->cuIpcGetMemHandle(handle, address);
    struct handle ours = {.process = own_process(),
                          .number = allocation_share(allocation.address),
                          .bytes = allocation.bytes,
                          .suffix = control_suffix()};
    if (ours.number == 0)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(ours.mark, mark, sizeof mark);
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &ours, sizeof ours);
    return CUDA_SUCCESS;
}

CUresult ipc_export(unsigned long long process, unsigned long long number, int *descriptor)
{
    struct allocation allocation;
    if (process != own_process() || !allocation_shared(number, &allocation) || !allocation.has_handle)
        return CUDA_ERROR_INVALID_VALUE;
    return driver()->cuMemExportToShareableHandle(descriptor, allocation.handle,
                                                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
}

/* -- the process that maps it */

static struct sockaddr_un source = {.sun_family = AF_UNIX};

/* Memory of another process, at one address however often it is opened, as with the driver. */
struct mapped {
    struct handle handle;
    CUdeviceptr address;
    size_t opened;
    struct mapped *next;
};
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static struct mapped *all_mapped;

/* A worker that a server of workers has forked can use CUDA, and opens memory itself. */
void ipc_in_child(void)
{
    opening = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    all_mapped = NULL;
}

void ipc_set_socket(const char *path)
{
    if (strlen(path) < sizeof source.sun_path)
        strcpy(source.sun_path, path);
}

/* Receive the descriptor that comes with the reply, which tells nothing else that is needed; -1: none did. */
static int receive(int connection)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control;
    char text[512];
    struct iovec part = {text, sizeof text};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    int descriptor = -1;
    if (recvmsg(connection, &message, MSG_CMSG_CLOEXEC) <= 0)
        return -1;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header != NULL && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS)
        memcpy(&descriptor, CMSG_DATA(header), sizeof descriptor);
    return descriptor;
}

static int request(const struct handle *handle)
{
    char line[64];
    struct sockaddr_un name = source;
    size_t base = strlen(name.sun_path);
    if (handle->suffix != 0)
        snprintf(name.sun_path + base, sizeof name.sun_path - base, "-%lld", handle->suffix);
    int descriptor = -1, connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int length = snprintf(line, sizeof line, "export %llx %llx\n", handle->process, handle->number);
    if (connection < 0)
        return -1;
    if (source.sun_path[0] != '\0' && connect(connection, (struct sockaddr *)&name, sizeof name) == 0 &&
        send(connection, line, (size_t)length, MSG_NOSIGNAL) == length)
        descriptor = receive(connection);
    close(connection);
    return descriptor;
}

static CUresult map(const struct handle *handle, CUdeviceptr *address)
{
    const struct driver *cu = driver();
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle memory;
    CUresult result = cu->cuCtxGetDevice(&access.location.id);
    if (result != CUDA_SUCCESS)
        return result;
    int descriptor = request(handle);
    if (descriptor < 0)
        return CUDA_ERROR_INVALID_VALUE;
    result = cu->cuMemImportFromShareableHandle(&memory, (void *)(intptr_t)descriptor,
                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    close(descriptor);
    if (result != CUDA_SUCCESS)
        return result;
    result = cu->cuMemAddressReserve(address, handle->bytes, 0, 0, 0);
    if (result == CUDA_SUCCESS) {
        result = cu->cuMemMap(*address, handle->bytes, 0, memory, 0);
        if (result == CUDA_SUCCESS) {
            result = cu->cuMemSetAccess(*address, handle->bytes, &access, 1);
            if (result != CUDA_SUCCESS)
                cu->cuMemUnmap(*address, handle->bytes);
        }
        if (result != CUDA_SUCCESS)
            cu->cuMemAddressFree(*address, handle->bytes);
    }
    cu->cuMemRelease(memory); /* it lives as long as it is mapped */
    return result;
}

static CUresult open_memory(CUdeviceptr *address, const struct handle *handle)
{
    if (handle->process == own_process())
        return CUDA_ERROR_INVALID_CONTEXT; /* as the driver: not in the process that has it */
    struct mapped *mapped = all_mapped;
    while (mapped != NULL && memcmp(&mapped->handle, handle, sizeof *handle) != 0)
        mapped = mapped->next;
    if (mapped == NULL) {
        mapped = calloc(1, sizeof *mapped);
        CUresult result = mapped != NULL ? map(handle, &mapped->address) : CUDA_ERROR_OUT_OF_MEMORY;
        if (result != CUDA_SUCCESS) {
            free(mapped);
            return result;
        }
        mapped->handle = *handle;
        mapped->next = all_mapped;
        all_mapped = mapped;
    }
    mapped->opened++;
    *address = mapped->address;
    return CUDA_SUCCESS;
}

static CUresult open_handle(CUdeviceptr *address, CUipcMemHandle theirs, unsigned int flags,
                            CUresult (*original)(CUdeviceptr *, CUipcMemHandle, unsigned int))
{
    struct handle handle;
    memcpy(&handle, &theirs, sizeof handle);
    if (address == NULL || memcmp(handle.mark, mark, sizeof mark) != 0 || driver() == NULL ||
        driver()->cuMemImportFromShareableHandle == NULL)
        return original(address, theirs, flags);
    pthread_mutex_lock(&opening);
    CUresult result = open_memory(address, &handle);
    pthread_mutex_unlock(&opening);
    return result;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    const struct driver *original = any_driver();
    if (original == NULL || original->cuIpcOpenMemHandle == NULL)
        return CUDA_ERROR_NOT_INITIALIZED;
    return open_handle(address, handle, flags, original->cuIpcOpenMemHandle);
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags)
{
    const struct driver *original = any_driver();
    if (original == NULL || original->cuIpcOpenMemHandle_v2 == NULL)
        return CUDA_ERROR_NOT_INITIALIZED;
    return open_handle(address, handle, flags, original->cuIpcOpenMemHandle_v2);
}

/* After the work of the context, as the driver's. */
static CUresult unmap(struct mapped *mapped)
{
    const struct driver *cu = driver();
    CUresult result = cu->cuCtxSynchronize();
    if (result == CUDA_SUCCESS)
        result = cu->cuMemUnmap(mapped->address, mapped->handle.bytes);
    return result == CUDA_SUCCESS ? cu->cuMemAddressFree(mapped->address, mapped->handle.bytes) : result;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
    const struct driver *original = any_driver();
    if (original == NULL || original->cuIpcCloseMemHandle == NULL)
        return CUDA_ERROR_NOT_INITIALIZED;
    launch_gate_wait();
    pthread_mutex_lock(&opening);
    struct mapped **at = &all_mapped, *found;
    while (*at != NULL && (*at)->address != address)
        at = &(*at)->next;
    CUresult result = CUDA_SUCCESS;
    if ((found = *at) != NULL && --found->opened == 0) {
        result = unmap(found);
        found->opened = result != CUDA_SUCCESS;
        if (result == CUDA_SUCCESS) {
            *at = found->next;
            free(found);
        }
    }
    pthread_mutex_unlock(&opening);
    return found != NULL ? result : original->cuIpcCloseMemHandle(address);
}
