/* A gate that calls which use the GPU pass (`launch_gate_names.h`): launches, copies, waits, events, graphs.
 *
 * Open, it costs a call the load of one word and a jump.  Closed, a call waits, before it enters the driver; the first
 * is seen by the kernel's owner in `published.h`, and a thread that a signal interrupts gets an error.  The gate is
 * closed before the driver locks, and the driver's lock stays what keeps calls from memory that is not there: some do
 * not pass the gate, and some have passed it when it is closed.  Others (cuStreamQuery) do not wait at that lock, and
 * end a process that the driver has suspended: before that the gate is closed for as long as it lasts.
 *
 * The functions of the gate are written for x86-64; elsewhere there is no gate, and every call goes to the driver.
 */
#pragma once

#include <stdbool.h>

#include "driver.h"
#include "lookup.h"

#define HAS_LAUNCH_GATE HAS_DLSYM

/* Learn where the functions are that this library exports; ``library`` is the driver. */
void launch_gate_prepare(void *library);

/* Whether a function of this name, with or without the endings of a variant, passes the gate. */
bool launch_gate_has(const char *name);

/* The function to call instead of ``original``, a function of the driver that passes the gate; ``original`` itself
 * if there are too many. */
void *launch_gate_function(void *original);

/* Whether a function is one that this library exports by a name. */
bool launch_gate_has_function(const void *function);

/* The same, and the driver lacks it. */
bool launch_gate_is_missing(const void *function);

/* Pass the gate: CUDA_SUCCESS, or the error to return instead of calling the driver. */
CUresult launch_gate_pass(void);

/* The same for a call that gives something back, or ends something: an error would leave it with a program that does not
 * try again, so an interrupt does not end this wait. */
void launch_gate_wait(void);

/* Close the gate, for some seconds or, with 0, until it is opened. */
void launch_gate_close(double seconds);
void launch_gate_open(void);

/* Watch an open gate for the next call, which ends that and passes; false: there is no gate, or it is not open.  Or do no
 * longer.  And whether no call has come since. */
bool launch_gate_watch(bool watch);
bool launch_gate_is_watched(void);

/* A number that changes when the gate is closed. */
unsigned launch_gate_closings(void);

/* Milliseconds until the gate opens by itself, for poll(2); -1: never. */
int launch_gate_remaining(void);

/* Open the gate if its time is over; ``needed``: it stays closed, until it is opened. */
void launch_gate_expire(bool needed);

/* Open the gate, in a child that was just forked. */
void launch_gate_in_child(void);
