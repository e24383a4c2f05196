/* Watching directories. */
#ifndef SANDYARD_WATCH_H
#define SANDYARD_WATCH_H

/* Send the events that happened so far, as far as there are room and credit: whoever has the answer
 * to an operation has its events already. */
void watches_flush(void);

#endif
