#pragma once

/* Let worker processes preload this library, and find the socket of `control.h`. */
void workers_preload(const char *library, const char *socket);
