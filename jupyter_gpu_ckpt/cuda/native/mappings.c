#define _GNU_SOURCE
#include "mappings.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "child.h"
#include "table_lock.h"

struct memory {
    CUmemGenericAllocationHandle handle;
    CUmemGenericAllocationHandle original; /* the driver's */
    bool has_original;                     /* while the program has a reference, and during a swap */
    size_t references;                     /* of the program to its handle */
    size_t bytes;
    CUmemAllocationProp properties;
    unsigned long long flags;
    size_t mappings, gone; /* of them those that a swap has unmapped */
    size_t kept;           /* reasons to leave it to the driver */
    bool counted;
    bool exported;       /* another process may have it */
    bool in_use;         /* of a call, when a swap was planned */
    CUdeviceptr address; /* of the mapping that it is copied by; 0: it is not swapped */
    CUcontext context;
    size_t offset; /* in host memory */
};

struct mapping {
    CUdeviceptr address;
    size_t bytes, offset;
    CUmemGenericAllocationHandle handle;
    enum { GONE, PRESENT, USABLE } state; /* differs from USABLE only while it is swapped out */
    unsigned char access[MAX_DEVICES];    /* flags of CUmemAccessDesc */
};

/* In ascending order, by handle and by address: the driver's handles are no numbers to count on, ours are. */
static struct memory *memories;
static struct mapping *mappings;
static size_t memory_count, memory_slots, mapping_count, mapping_slots;
static struct mapping_call *calls;
static CUcontext contexts[MAX_DEVICES];
static atomic_size_t total, total_bytes, total_exported, orphans;
static atomic_bool noted; /* a context, at any time */
static atomic_int away;   /* memory is swapped out */

/* The upper half of our handles: neither an address nor a small number, as the driver's may be. */
#define ISSUED ((CUmemGenericAllocationHandle)0x6770636b)

bool mappings_issued(CUmemGenericAllocationHandle handle) { return handle >> 32 == ISSUED && !is_inert(); }

void mappings_in_child(void)
{
    memories = NULL;
    mappings = NULL;
    memory_count = memory_slots = mapping_count = mapping_slots = 0;
    total = total_bytes = total_exported = orphans = 0;
    calls = NULL;
    memset(contexts, 0, sizeof contexts);
    noted = false;
    away = 0;
}

/* -- the tables */

/* Make space for one more element; false: there is no memory. */
static bool grow(void **array, size_t size, size_t count, size_t *slots)
{
    if (count < *slots)
        return true;
    size_t wanted = *slots != 0 ? 2 * *slots : 1024;
    void *larger = mmap(NULL, wanted * size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (larger == MAP_FAILED)
        return false;
    if (count != 0) {
        memcpy(larger, *array, count * size);
        munmap(*array, *slots * size);
    }
    *array = larger;
    *slots = wanted;
    return true;
}

static struct memory *find_memory(CUmemGenericAllocationHandle handle)
{
    size_t first = 0, end = memory_count;
    while (first < end) {
        size_t middle = first + (end - first) / 2;
        if (memories[middle].handle < handle)
            first = middle + 1;
        else
            end = middle;
    }
    return first < memory_count && memories[first].handle == handle ? &memories[first] : NULL;
}

/* Index of the first mapping that ends after the address. */
static size_t first_mapping(CUdeviceptr address)
{
    size_t first = 0, end = mapping_count;
    while (first < end) {
        size_t middle = first + (end - first) / 2;
        if (mappings[middle].address + mappings[middle].bytes <= address)
            first = middle + 1;
        else
            end = middle;
    }
    return first;
}

static bool touches(size_t at, CUdeviceptr address, size_t bytes)
{
    return at < mapping_count && mappings[at].address < address + bytes;
}

static void count(struct memory *memory)
{
    bool counts = memory->mappings != 0 && memory->kept == 0;
    if (counts == memory->counted)
        return;
    memory->counted = counts;
    total += counts ? 1 : (size_t)-1;
    total_bytes += counts ? memory->bytes : -memory->bytes;
}

bool mappings_contain(CUdeviceptr address)
{
    table_lock();
    bool contain = touches(first_mapping(address), address, 1);
    table_unlock();
    return contain;
}

void mappings_total(size_t *number, size_t *bytes)
{
    *number = total;
    *bytes = total_bytes;
}

size_t mappings_exported(void) { return total_exported; }

static void remove_memory(struct memory *memory)
{
    if (memory->exported)
        total_exported--;
    size_t behind = memory_count - (size_t)(memory - memories) - 1;
    memmove(memory, memory + 1, behind * sizeof *memory);
    memory_count--;
}

/* The driver has freed it with its last reference or its last mapping: unless it has refused to take a reference of ours
 * back, which it is offered again then. */
static void forget_unused(struct memory *memory)
{
    count(memory);
    if (memory->references != 0 || memory->mappings != 0)
        return;
    if (memory->has_original)
        orphans++;
    else
        remove_memory(memory);
}

/* Without the lock while the driver is called. */
static void release_orphans(void)
{
    while (atomic_load(&orphans) != 0) {
        CUmemGenericAllocationHandle original = 0;
        table_lock();
        for (size_t at = 0; at < memory_count && original == 0; at++)
            if (memories[at].references == 0 && memories[at].mappings == 0 && memories[at].has_original) {
                original = memories[at].original;
                remove_memory(&memories[at]);
                orphans--;
            }
        table_unlock();
        if (original == 0 || driver()->cuMemRelease(original) != CUDA_SUCCESS)
            return;
    }
}

CUmemGenericAllocationHandle mappings_add(CUmemGenericAllocationHandle original, size_t bytes,
                                          const CUmemAllocationProp *properties, unsigned long long flags)
{
    static CUmemGenericAllocationHandle last = ISSUED << 32;
    CUmemGenericAllocationHandle handle = 0;
    table_lock();
    if (grow((void **)&memories, sizeof *memories, memory_count, &memory_slots) && mappings_issued(last + 1)) {
        handle = ++last;
        memories[memory_count++] = (struct memory){
            .handle = handle, .original = original, .has_original = true, .references = 1, .bytes = bytes,
            .properties = *properties, .flags = flags, .offset = NOT_COPIED};
    }
    table_unlock();
    return handle;
}

void mappings_note_context(void)
{
    CUcontext context;
    CUdevice device;
    if (driver()->cuCtxGetCurrent(&context) != CUDA_SUCCESS || context == NULL ||
        driver()->cuCtxGetDevice(&device) != CUDA_SUCCESS || device < 0 || device >= MAX_DEVICES)
        return;
    table_lock();
    if (contexts[device] == NULL)
        contexts[device] = context;
    noted = true;
    table_unlock();
}

bool mappings_have_context(void) { return atomic_load_explicit(&noted, memory_order_relaxed); }

void mappings_forget_context(CUcontext context)
{
    table_lock();
    for (CUdevice device = 0; device < MAX_DEVICES; device++)
        if (contexts[device] == context)
            contexts[device] = NULL;
    table_unlock();
}

/* -- calls of the program */

/* Lock the tables while no memory is swapped out.  The wait has no timeout, as the launch gate's: Linux and CRIU begin
 * it anew after a stop or a restore. */
static void lock_present(void)
{
    table_lock();
    while (atomic_load(&away) != 0) {
        table_unlock();
        syscall(SYS_futex, &away, FUTEX_WAIT_PRIVATE, 1, NULL, NULL, 0);
        table_lock();
    }
}

static void link_call(struct mapping_call *call)
{
    call->before = NULL;
    call->next = calls;
    if (calls != NULL)
        calls->before = call;
    calls = call;
}

static void unlink_call(struct mapping_call *call)
{
    if (call->before != NULL)
        call->before->next = call->next;
    else
        calls = call->next;
    if (call->next != NULL)
        call->next->before = call->before;
}

bool mappings_begin(struct mapping_call *call)
{
    lock_present();
    struct memory *memory = call->handle != 0 ? find_memory(call->handle) : NULL;
    bool known = call->handle == 0 || (memory != NULL && memory->references != 0);
    if (known) {
        call->original = memory != NULL ? memory->original : 0;
        link_call(call);
    }
    table_unlock();
    table_wait_for_reads();
    return known;
}

void mappings_end(struct mapping_call *call)
{
    table_lock();
    unlink_call(call);
    table_unlock();
}

bool mappings_begin_release(struct mapping_call *call, bool *ends)
{
    lock_present();
    struct memory *memory = find_memory(call->handle);
    bool known = memory != NULL && memory->references != 0;
    *ends = known && memory->references == 1;
    if (*ends) {
        call->original = memory->original;
        memory->has_original = false;
        link_call(call);
    }
    if (known)
        memory->references--;
    table_unlock();
    table_wait_for_reads();
    return known;
}

void mappings_released(struct mapping_call *call, bool done)
{
    table_lock();
    unlink_call(call);
    struct memory *memory = find_memory(call->handle);
    if (memory != NULL && !done) {
        memory->references++;
        memory->has_original = true;
    } else if (memory != NULL)
        forget_unused(memory);
    table_unlock();
}

CUmemGenericAllocationHandle mappings_begin_retain(struct mapping_call *call, bool *released)
{
    lock_present();
    size_t at = first_mapping(call->address);
    struct memory *memory = touches(at, call->address, 1) ? find_memory(mappings[at].handle) : NULL;
    *released = memory != NULL && memory->references == 0;
    if (memory != NULL && !*released)
        memory->references++;
    call->handle = memory != NULL ? memory->handle : 0;
    if (*released)
        link_call(call);
    table_unlock();
    return call->handle;
}

void mappings_retained(struct mapping_call *call, CUresult result)
{
    table_lock();
    unlink_call(call);
    struct memory *memory = find_memory(call->handle);
    bool second = memory != NULL && memory->has_original; /* another thread has done the same */
    if (result == CUDA_SUCCESS && memory != NULL) {
        memory->references++;
        memory->original = second ? memory->original : call->original;
        memory->has_original = true;
    }
    table_unlock();
    if (result == CUDA_SUCCESS && second)
        driver()->cuMemRelease(call->original);
}

static void keep(struct memory *memory, bool keeps)
{
    if (keeps || memory->kept != 0)
        memory->kept += keeps ? 1 : (size_t)-1;
    count(memory);
}

void mappings_mapped(struct mapping_call *call, size_t offset)
{
    table_lock();
    unlink_call(call);
    struct memory *memory = find_memory(call->handle);
    if (!grow((void **)&mappings, sizeof *mappings, mapping_count, &mapping_slots)) {
        if (memory != NULL)
            keep(memory, true); /* for ever: nobody knows where it is mapped */
    } else if (memory != NULL) {
        size_t at = first_mapping(call->address);
        memmove(&mappings[at + 1], &mappings[at], (mapping_count - at) * sizeof *mappings);
        mappings[at] = (struct mapping){
            .address = call->address, .bytes = call->bytes, .offset = offset, .handle = call->handle, .state = USABLE};
        mapping_count++;
        memory->mappings++;
        count(memory);
    }
    table_unlock();
}

static bool is_within(const struct mapping *mapping, const struct mapping_call *call)
{
    return mapping->address >= call->address &&
           mapping->address + mapping->bytes <= call->address + call->bytes;
}

void mappings_unmapped(struct mapping_call *call)
{
    table_lock();
    unlink_call(call);
    size_t first = first_mapping(call->address), end = first;
    for (; touches(end, call->address, call->bytes); end++) {
        struct memory *memory = find_memory(mappings[end].handle);
        memory->mappings--;
        if (!is_within(&mappings[end], call)) /* the rest of it is not in the table */
            keep(memory, true);
        forget_unused(memory);
    }
    if (end != first) {
        memmove(&mappings[first], &mappings[end], (mapping_count - end) * sizeof *mappings);
        mapping_count -= end - first;
    }
    table_unlock();
    release_orphans();
}

void mappings_access_set(struct mapping_call *call, const CUmemAccessDesc *access, size_t number)
{
    table_lock();
    unlink_call(call);
    for (size_t at = first_mapping(call->address); touches(at, call->address, call->bytes); at++) {
        bool reproducible = is_within(&mappings[at], call);
        for (size_t each = 0; each < number; each++)
            if (access[each].location.type != CU_MEM_LOCATION_TYPE_DEVICE || access[each].location.id < 0 ||
                access[each].location.id >= MAX_DEVICES)
                reproducible = false;
            else
                mappings[at].access[access[each].location.id] = (unsigned char)access[each].flags;
        if (!reproducible)
            keep(find_memory(mappings[at].handle), true);
    }
    table_unlock();
}

void mappings_keep(const struct mapping_call *call, bool keeps)
{
    table_lock();
    struct memory *memory = call->handle != 0 ? find_memory(call->handle) : NULL;
    if (memory != NULL)
        keep(memory, keeps);
    for (size_t at = first_mapping(call->address); touches(at, call->address, call->bytes); at++)
        keep(find_memory(mappings[at].handle), keeps);
    table_unlock();
}

void mappings_note_exported(const struct mapping_call *call)
{
    table_lock();
    struct memory *memory = find_memory(call->handle);
    if (memory != NULL && !memory->exported) {
        memory->exported = true;
        total_exported++;
    }
    table_unlock();
}

/* -- swaps */

static void mark_in_use(void)
{
    for (struct mapping_call *call = calls; call != NULL; call = call->next) {
        struct memory *memory = call->handle != 0 ? find_memory(call->handle) : NULL;
        if (memory != NULL)
            memory->in_use = true;
        for (size_t at = first_mapping(call->address); touches(at, call->address, call->bytes); at++)
            find_memory(mappings[at].handle)->in_use = true;
    }
}

void mappings_plan(void)
{
    for (size_t at = 0; at < memory_count; at++) {
        memories[at].in_use = false;
        memories[at].address = 0;
        memories[at].context = contexts[memories[at].properties.location.id];
    }
    mark_in_use();
    bool can_retain = driver()->cuMemRetainAllocationHandle != NULL;
    for (size_t at = 0; at < mapping_count; at++) {
        const struct mapping *mapping = &mappings[at];
        struct memory *memory = find_memory(mapping->handle);
        bool whole = mapping->offset == 0 && mapping->bytes == memory->bytes;
        bool writable = mapping->access[memory->properties.location.id] == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        if (whole && writable && !memory->in_use && memory->kept == 0 && memory->address == 0 &&
            memory->context != NULL && (memory->has_original || can_retain))
            memory->address = mapping->address;
    }
    for (size_t at = 0; at < memory_count; at++)
        if (memories[at].address == 0)
            memories[at].offset = NOT_COPIED;
}

bool mappings_next_placed(size_t *at, struct placed *next)
{
    while (*at < memory_count) {
        struct memory *memory = &memories[(*at)++];
        if (memory->address == 0)
            continue;
        *next = (struct placed){memory->bytes, &memory->offset};
        return true;
    }
    return false;
}

bool mappings_have_place(CUdeviceptr address, size_t bytes, size_t offset)
{
    size_t at = first_mapping(address);
    if (at == mapping_count || mappings[at].address != address || mappings[at].bytes != bytes)
        return false;
    const struct memory *memory = find_memory(mappings[at].handle);
    for (const struct mapping_call *call = calls; call != NULL; call = call->next)
        if (call->handle == memory->handle || (call->address < address + bytes && address < call->address + call->bytes))
            return false;
    return memory->address == address && memory->offset == offset && memory->kept == 0;
}

bool mappings_copied(size_t *at, struct copied *next)
{
    while (*at < memory_count) {
        const struct memory *memory = &memories[(*at)++];
        if (memory->address == 0)
            continue;
        *next = (struct copied){memory->context, memory->address, memory->bytes, memory->offset};
        return true;
    }
    return false;
}

CUcontext mappings_context(CUdevice device) { return memory_count != 0 ? contexts[device] : NULL; }

/* The driver's handle, without which memory that is partly unmapped could not be mapped again. */
static CUresult need_original(struct memory *memory)
{
    if (memory->has_original || memory->address == 0 || memory->gone == memory->mappings)
        return CUDA_SUCCESS;
    CUresult result = driver()->cuMemRetainAllocationHandle(&memory->original, (void *)(uintptr_t)memory->address);
    memory->has_original = result == CUDA_SUCCESS;
    return result;
}

static CUresult release(struct memory *memory)
{
    if (!memory->has_original || memory->address == 0)
        return CUDA_SUCCESS;
    CUresult result = driver()->cuMemRelease(memory->original);
    memory->has_original = result != CUDA_SUCCESS;
    return result;
}

/* Only memory that is nowhere mapped: what the driver refused to unmap needs its handle again. */
static CUresult release_unmapped(struct memory *memory)
{
    return memory->gone == memory->mappings ? release(memory) : CUDA_SUCCESS;
}

static CUresult unmap(struct mapping *mapping, struct memory *memory)
{
    if (mapping->state == GONE)
        return CUDA_SUCCESS;
    CUresult result = driver()->cuMemUnmap(mapping->address, mapping->bytes);
    if (result == CUDA_SUCCESS) {
        mapping->state = GONE;
        memory->gone++;
    }
    return result;
}

static CUresult create(struct memory *memory)
{
    if (memory->has_original || memory->address == 0)
        return CUDA_SUCCESS;
    CUresult result =
        driver()->cuMemCreate(&memory->original, memory->bytes, &memory->properties, memory->flags);
    memory->has_original = result == CUDA_SUCCESS;
    return result;
}

static CUresult map(struct mapping *mapping, struct memory *memory)
{
    CUmemAccessDesc access[MAX_DEVICES];
    size_t number = 0;
    CUresult result = CUDA_SUCCESS;
    if (mapping->state == GONE) {
        result = driver()->cuMemMap(mapping->address, mapping->bytes, mapping->offset, memory->original, 0);
        if (result == CUDA_SUCCESS) {
            mapping->state = PRESENT;
            memory->gone--;
        }
    }
    for (CUdevice device = 0; device < MAX_DEVICES; device++)
        if (mapping->access[device] != 0)
            access[number++] = (CUmemAccessDesc){.location = {CU_MEM_LOCATION_TYPE_DEVICE, device},
                                                 .flags = mapping->access[device]};
    if (mapping->state == PRESENT && number != 0)
        result = driver()->cuMemSetAccess(mapping->address, mapping->bytes, access, number);
    if (mapping->state == PRESENT && result == CUDA_SUCCESS)
        mapping->state = USABLE;
    return result;
}

static CUresult each_memory(CUresult (*step)(struct memory *), bool past_errors)
{
    CUresult result = CUDA_SUCCESS;
    for (size_t at = 0; at < memory_count && (past_errors || result == CUDA_SUCCESS); at++) {
        CUresult own = step(&memories[at]);
        result = result != CUDA_SUCCESS ? result : own;
    }
    return result;
}

static CUresult each_mapping(CUresult (*step)(struct mapping *, struct memory *), bool past_errors)
{
    CUresult result = CUDA_SUCCESS;
    for (size_t at = 0; at < mapping_count && (past_errors || result == CUDA_SUCCESS); at++) {
        struct memory *memory = find_memory(mappings[at].handle);
        if (memory->address == 0)
            continue;
        CUresult own = driver()->cuCtxSetCurrent(memory->context);
        own = own != CUDA_SUCCESS ? own : step(&mappings[at], memory);
        result = result != CUDA_SUCCESS ? result : own;
    }
    return result;
}

CUresult mappings_unmap(bool past_errors)
{
    atomic_store(&away, 1);
    CUresult result = past_errors ? CUDA_SUCCESS : each_memory(need_original, false);
    if (past_errors || result == CUDA_SUCCESS)
        result = each_mapping(unmap, past_errors);
    if (past_errors || result == CUDA_SUCCESS) {
        CUresult released = each_memory(release_unmapped, past_errors);
        result = result != CUDA_SUCCESS ? result : released;
    }
    return result;
}

static CUresult each_mapping_of(struct memory *memory, CUresult (*step)(struct mapping *, struct memory *))
{
    CUresult result = CUDA_SUCCESS;
    size_t left = memory->mappings, at = left == 1 ? first_mapping(memory->address) : 0;
    for (; left != 0 && at < mapping_count && result == CUDA_SUCCESS; at++)
        if (mappings[at].handle == memory->handle) {
            result = step(&mappings[at], memory);
            left--;
        }
    return result;
}

CUresult mappings_unmap_one(size_t number)
{
    struct memory *memory = &memories[number];
    atomic_store(&away, 1);
    CUresult result = need_original(memory);
    if (result == CUDA_SUCCESS)
        result = each_mapping_of(memory, unmap);
    return result == CUDA_SUCCESS ? release_unmapped(memory) : result;
}

CUresult mappings_map_one(size_t number)
{
    CUresult result = create(&memories[number]);
    return result == CUDA_SUCCESS ? each_mapping_of(&memories[number], map) : result;
}

bool mappings_exportable(size_t number, CUmemGenericAllocationHandle *handle)
{
    const struct memory *memory = &memories[number];
    *handle = memory->original;
    return memory->has_original &&
           memory->properties.requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
}

/* The program has no reference: its mappings alone keep the memory. */
static CUresult release_surplus(struct memory *memory)
{
    return memory->references == 0 ? release(memory) : CUDA_SUCCESS;
}

void mappings_exclude_present(void)
{
    for (size_t at = 0; at < memory_count; at++)
        if (memories[at].address != 0 && memories[at].gone == 0) {
            release_surplus(&memories[at]);
            memories[at].address = 0;
            memories[at].offset = NOT_COPIED;
        }
}

void mappings_swapped_in(void)
{
    each_memory(release_surplus, true);
    atomic_store(&away, 0);
    syscall(SYS_futex, &away, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}
