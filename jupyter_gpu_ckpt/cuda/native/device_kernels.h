/* Kernels of this library's own on the GPU: text in PTX, which the driver compiles for its GPU, once in each context. */
#pragma once

#include "driver.h"

/* Load the kernel of this name from its text in the current context, unless it is loaded there. */
void device_kernel_load(CUcontext context, const char *name, const char *text);

/* The kernel in a context; NULL where it is not loaded. */
CUfunction device_kernel(CUcontext context, const char *name);

/* Whether any context has a kernel; may be called at any time. */
bool device_kernels_are_loaded(void);

/* Forget the kernels of a context that was destroyed; and all, in a child that was just forked. */
void device_kernels_forget(CUcontext context);
void device_kernels_in_child(void);
