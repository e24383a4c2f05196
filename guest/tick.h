/* The timer that a guest kernel ticked with until it had a better one. */
#ifndef SANDYARD_TICK_H
#define SANDYARD_TICK_H

/* Let it come to rest: without interrupts it goes on expiring in QEMU (9.1 and later), a few hundred times a second,
 * for as long as the guest lives. Where there is none nothing happens. */
void tick_rest(void);

#endif
