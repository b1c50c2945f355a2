/* The memory that programs create, map and release themselves (`virtual_memory.c`), and where it is mapped.
 *
 * A swap unmaps it, releases it, and creates other memory of the same kind, whose handle of the driver's is another one:
 * so a program gets handles of ours, and every call is translated.  What cannot be created again as it was stays with
 * the driver, which moves it: memory that another process, a device or a multicast object may have (it is *kept*), that
 * is nowhere mapped as a whole where its own device may write, that a call of the driver is using at the moment, and
 * memory that no context is known for.
 */
#pragma once

#include "allocations.h"
#include "driver.h"

/* Whether a handle is one of ours.  No other has ever had its number, and none will. */
bool mappings_issued(CUmemGenericAllocationHandle handle);

/* Give the driver's handle of memory that was just created a handle of ours; 0: there is no memory for the table. */
CUmemGenericAllocationHandle mappings_add(CUmemGenericAllocationHandle original, size_t bytes,
                                          const CUmemAllocationProp *properties, unsigned long long flags);

/* Note this thread's context: memory of its device can be copied in it.  And forget one that was destroyed. */
void mappings_note_context(void);
void mappings_forget_context(CUcontext context);
bool mappings_have_context(void);

/* A call of the driver about a handle, a range of addresses, or both.  From `mappings_begin` to `mappings_end` the
 * memory is not swapped. */
struct mapping_call {
    CUmemGenericAllocationHandle handle; /* of ours; or 0 */
    CUdeviceptr address;
    size_t bytes; /* 0: no range */
    CUmemGenericAllocationHandle original;
    struct mapping_call *next, *before;
};

/* Wait until no memory is swapped out, and begin; false, and nothing has begun, if the program does not have the
 * handle. */
bool mappings_begin(struct mapping_call *call);
void mappings_end(struct mapping_call *call);

/* The same, of a program that gives a reference to its handle back; ``ends``: it was the last, and the driver is to be
 * called.  Then `mappings_released` ends the call. */
bool mappings_begin_release(struct mapping_call *call, bool *ends);
void mappings_released(struct mapping_call *call, bool done);

/* Of an address: give the program another reference to the handle of the memory that is mapped there, 0 if there is
 * none.  ``released``: the program has released the handle, and the driver is to be asked for it; then
 * `mappings_retained` ends the call. */
CUmemGenericAllocationHandle mappings_begin_retain(struct mapping_call *call, bool *released);
void mappings_retained(struct mapping_call *call, CUresult result);

/* End a call that the driver has performed: it has mapped the range from an offset of the memory; unmapped it; or set
 * access to it. */
void mappings_mapped(struct mapping_call *call, size_t offset);
void mappings_unmapped(struct mapping_call *call);
void mappings_access_set(struct mapping_call *call, const CUmemAccessDesc *access, size_t count);

/* Keep the memory of a call that has begun, by its handle or its range; or no longer, when what was the reason was not
 * done. */
void mappings_keep(const struct mapping_call *call, bool keep);

/* Note that another process may have the memory of a call by its handle, for as long as it exists; the number of such
 * memories, at any time. */
void mappings_note_exported(const struct mapping_call *call);
size_t mappings_exported(void);

/* Whether the program has mapped memory there. */
bool mappings_contain(CUdeviceptr address);

/* Number of memories that are mapped and not kept, and their bytes; may be called at any time. */
void mappings_total(size_t *count, size_t *bytes);

/* Forget everything, in a child that was just forked. */
void mappings_in_child(void);

/* -- swaps: while the tables are locked (`table_lock_for_swap`) */

/* Decide what is swapped.  Its offsets in host memory are those of the last time, if it was swapped then. */
void mappings_plan(void);

/* Memory that is swapped: its bytes, and its offset in host memory, for the caller to change. */
struct placed {
    size_t bytes, *offset;
};

/* The next of it after ``at``, which begins as 0; false at the end. */
bool mappings_next_placed(size_t *at, struct placed *next);

/* What is swapped is copied by one mapping of it: the next, likewise; false at the end. */
struct copied {
    CUcontext context;
    CUdeviceptr address;
    size_t bytes, offset;
};
bool mappings_copied(size_t *at, struct copied *next);

/* Whether that mapping can be read, and its memory has this place in host memory. */
bool mappings_have_place(CUdeviceptr address, size_t bytes, size_t offset);

/* The context in which memory of a device is copied; NULL: there is no such memory, or no context. */
CUcontext mappings_context(CUdevice device);

/* Unmap and release what is swapped, until an error or, ``past_errors``, to the end; return the first error.  Calls of
 * the program wait from now on. */
CUresult mappings_unmap(bool past_errors);

/* The same for one memory in its context, by the number with which `mappings_copied` has left it (less one); and create
 * and map it again, with the same access.  All can be repeated after failure. */
CUresult mappings_unmap_one(size_t number);
CUresult mappings_map_one(size_t number);

/* The driver's handle of that memory, if the program has it and it can be exported; else false. */
bool mappings_exportable(size_t number, CUmemGenericAllocationHandle *handle);

/* Leave what is not unmapped to the driver, as if it had not been planned. */
void mappings_exclude_present(void);

/* After the contents are back: calls of the program continue. */
void mappings_swapped_in(void);
